"""Measured choice: `measure` times backends (`measuring`), rules follow from the times (`choices`), a file holds both
(`measurements`). Calls never time anything."""

from fla.backends.tuning.measurements import MeasurementError, Measurements
from fla.backends.tuning.measuring import load_measurements, measure, unload_measurements

__all__ = ['MeasurementError', 'Measurements', 'load_measurements', 'measure', 'unload_measurements']

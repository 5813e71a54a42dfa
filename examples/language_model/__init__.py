"""A small hybrid language model on the package's own source text: `make demo`, or `python -m examples.language_model`.

It trains for about a minute on the machine's accelerator or CPU, and writes text by recurrent decoding. For every dispatched
function it shows which backend served it, why the backends before it did not, and how far it is from the reference in
float64. It checks every claim that it prints, and exits with status 1 if one is false.
"""

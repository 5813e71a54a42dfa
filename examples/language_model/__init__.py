"""A small hybrid language model on the package's own source text: `make demo`, or `python -m examples.language_model`.

It trains for about a minute on whatever the machine has, writes text by recurrent decoding, and shows for every dispatched
function which backend served it, why those before it did not, and how far it is from the reference in float64. Every claim
it prints is checked; where one is false the exit status is 1.
"""

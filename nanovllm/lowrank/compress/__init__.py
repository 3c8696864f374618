"""From a model to a folder of low-rank experts. Each line uses those above it.

options, text, writer       the command line; windows of tokens; folders that appear whole or not at all
model, stream               the model without engine and cache; all windows carried through it, layer by layer
solve, factors, layer       the mathematics; U and V of a layer; one layer of experts fitted
calibrate, predict          the inputs of the experts, recorded; the cost of an SVD rank, before anything is written
evaluate, refine, distill   quality, measured; training of U and V; the run that makes the folder
report                      a sweep over SVD ranks
"""

"""smcserve: Sequential Monte Carlo speculative decoding as a library.

Names of arrays end in the letters of their axes: `logits_RV` has the axes R and V. A digit is an axis of that length.
Each letter has one meaning:

A  batch indices of a round: the particles of all groups, one group after another, then padding
B  pages of a row: those of its tail, those of a path, or any others
C  candidate tokens of a row
D  head dimension
E  hidden size
F  branches: the rows of a batch index, or the draws of a row
G  groups, one for each request
H  query heads: all, or those of one key/value head
I  inputs of a product, among them inner features
J  key/value heads
K  drafted tokens
L  positions of a sequence
M  columns of a draft's own head
N  particles of a group, or their slots
O  outputs of a product
Q  tokens of a block: those that were drafted, with or without the seed, or those that are pending
R  rows
S  slots
T  tokens
V  vocabulary
W  words of 32 bits: a bit for each token, or packed codes
X  rows of a round, X = A * F

P, U, Y and Z are local letters: a module that names axes with them explains them in its docstring, or its package does.
A field keeps the axes that it has where it is defined.
"""

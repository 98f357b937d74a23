"""Layers, and the parts that models are made of.

A new part has a line here: importing its file enters it in the registry.
"""

from regard.layers import alignment as alignment
from regard.layers import attention as attention
from regard.layers import cells as cells
from regard.layers import contextual as contextual
from regard.layers import convolution as convolution
from regard.layers import feedforward as feedforward
from regard.layers import positions as positions
from regard.layers import relative as relative
from regard.layers import rotary as rotary

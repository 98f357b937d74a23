"""Layers, and the parts that models are made of.

A new part needs one line here, because importing its module registers it. `regard settings` lists parts in this order.
"""

# isort: off
from regard.layers.positions import absolute as absolute
from regard.layers.positions import rotary as rotary
from regard.layers.positions import contextual as contextual
from regard.layers.positions import relative as relative
from regard.layers.mixers import attention as attention
from regard.layers.mixers import convolution as convolution
from regard.layers import feedforward as feedforward
from regard.layers import experts as experts
from regard.layers import cells as cells
from regard.layers import lstm_variants as lstm_variants
from regard.layers import expression_cell as expression_cell
from regard.layers import recurrent_attention as recurrent_attention

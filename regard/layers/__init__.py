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
from regard.layers.mixers import s4 as s4
from regard.layers.mixers import s4d as s4d
from regard.layers.mixers import linear_attention as linear_attention
from regard.layers.mixers import gla as gla
from regard.layers.mixers import based as based
from regard.layers.mixers import gated_short_convolution as gated_short_convolution
from regard.layers.mixers import mamba2 as mamba2
from regard.layers.mixers import mamba as mamba
from regard.layers import feedforward as feedforward
from regard.layers import experts as experts
from regard.layers.mixers import rwkv as rwkv
from regard.layers import cells as cells
from regard.layers import lstm_variants as lstm_variants
from regard.layers import expression_cell as expression_cell
from regard.layers import recurrent_attention as recurrent_attention

"""The settings of every run and model, how recipes and the command line write them, and the registry of parts."""

from regard.config.schema import Config as Config
from regard.config.schema import DataConfig as DataConfig
from regard.config.schema import DecodeConfig as DecodeConfig
from regard.config.schema import ModelConfig as ModelConfig
from regard.config.schema import RecurrentSettings as RecurrentSettings
from regard.config.schema import RewardConfig as RewardConfig
from regard.config.schema import Seq2SeqSettings as Seq2SeqSettings
from regard.config.schema import TokenizerConfig as TokenizerConfig
from regard.config.schema import TrainConfig as TrainConfig
from regard.config.schema import VectorsConfig as VectorsConfig
from regard.config.schema import ViTSettings as ViTSettings

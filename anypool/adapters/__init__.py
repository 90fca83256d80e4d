"""Adapters turn a model class (`as_pooling_model`) or a checkpoint layout into a pooling model."""

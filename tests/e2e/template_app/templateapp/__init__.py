"""An app with the parts and keys of Flower's PyTorch template."""

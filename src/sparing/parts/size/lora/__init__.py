"""Adapters (LoRA): two thin layers beside a frozen one, in client models of different rank."""

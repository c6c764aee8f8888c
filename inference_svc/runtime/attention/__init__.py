"""Attention back-ends behind one interface: softmax attention in torch, and over pages."""

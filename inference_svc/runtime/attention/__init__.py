"""Attention back-ends: plain softmax attention in torch, behind one interface."""

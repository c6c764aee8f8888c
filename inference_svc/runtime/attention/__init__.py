"""Attention back-ends: over plain softmax or torch, behind one interface."""

"""Proposers: ways of drafting behind one protocol (`base.Proposer`)."""

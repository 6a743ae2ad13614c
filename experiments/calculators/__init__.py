"""Calculators from four papers: attention's memory traffic, passes, costs of long contexts, padding of shapes."""

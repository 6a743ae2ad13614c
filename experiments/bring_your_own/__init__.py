"""A model, an objective, a data source and a mixer from outside the package."""

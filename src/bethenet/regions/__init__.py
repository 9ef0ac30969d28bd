"""`RegionGraph`: the approximation. Regions of variables with counting numbers, and where they must agree."""

from bethenet.regions.regions import Containment, FactorHome, RegionGraph, RegionGroup

__all__ = ["Containment", "FactorHome", "RegionGraph", "RegionGroup"]

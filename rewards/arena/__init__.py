"""The arena: small team games whose floor and optimum are known by arithmetic."""

//! Parser and code generators of the driver API table.

//! What a worker executes on: the Device trait.

//! The window that guest and backend share: layout, ring, answer slots, fences, arena.

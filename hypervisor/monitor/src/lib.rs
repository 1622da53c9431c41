//! A small KVM monitor for guests with a window.

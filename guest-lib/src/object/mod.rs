//! Objects behind the handles that programs receive, and the contexts that own them.

pub mod array;
pub mod capture_mode;
pub mod compiled_code;
pub mod context;
pub mod context_events;
pub mod core_dump;
pub mod event;
pub mod function;
pub mod green_context;
pub mod image;
pub mod jit;
pub mod launch_v3;
pub mod link;
pub mod module;
pub mod sharing;
pub mod storage;
pub mod stream;
pub mod texture;
pub mod texture_reference;

//! User objects, which are destroyed when no graph references them any more.

use std::collections::HashMap;
use std::sync::LazyLock;

use wormhole_api::Handle;
use wormhole_api::handle::UserObject;
use wormhole_lock::{Mutex, MutexGuard};

use crate::error::{CuError, Result};
use crate::handle::{Table, from_pointer};
use crate::types::{CUhostFn, CUuserObject, c_void};

pub type ObjectHandle = Handle<UserObject>;

/// References of one object.
#[derive(Debug)]
struct Object {
    data: *mut c_void,
    destroy: CUhostFn,
    references: u64,
}

// SAFETY: the pointer belongs to the program, and is passed only to the program's own function.
unsafe impl Send for Object {}

static HANDLES: Table<UserObject, ()> = Table::new();
static OBJECTS: LazyLock<Mutex<HashMap<ObjectHandle, Object>>> = LazyLock::new(Mutex::default);

fn objects() -> MutexGuard<'static, HashMap<ObjectHandle, Object>> {
    OBJECTS.lock()
}

pub fn handle(object: CUuserObject) -> Result<ObjectHandle> {
    from_pointer(object).ok_or(CuError::INVALID_VALUE)
}

/// Implements `cuUserObjectCreate`.
pub fn create(data: *mut c_void, destroy: CUhostFn, references: u32) -> Result<ObjectHandle> {
    let handle = HANDLES.mint(|()| {})?;
    let object = Object {
        data,
        destroy,
        references: references.into(),
    };
    objects().insert(handle, object);
    Ok(handle)
}

/// Implements `cuUserObjectRetain`.
pub fn retain(object: ObjectHandle, count: u64) -> Result {
    let mut objects = objects();
    let object = objects.get_mut(&object).ok_or(CuError::INVALID_VALUE)?;
    object.references += count;
    Ok(())
}

/// Implements `cuUserObjectRelease`. The release of the last reference calls the program's function.
pub fn release(handle: ObjectHandle, count: u64) -> Result {
    let mut all = objects();
    let object = all.get_mut(&handle).ok_or(CuError::INVALID_VALUE)?;
    if count > object.references {
        return Err(CuError::INVALID_VALUE);
    }
    object.references -= count;
    if object.references > 0 {
        return Ok(());
    }
    let gone = all.remove(&handle);
    drop(all);
    HANDLES.forget(handle);
    if let Some(Object {
        data,
        destroy: Some(destroy),
        ..
    }) = gone
    {
        // SAFETY: the program asked for this call.
        unsafe { destroy(data) };
    }
    Ok(())
}

/// References of a graph to user objects.
#[derive(Debug, Default)]
pub struct Held(HashMap<ObjectHandle, u64>);

impl Held {
    pub fn take(&mut self, object: ObjectHandle, count: u64) {
        *self.0.entry(object).or_default() += count;
    }

    /// Removes references of the graph.
    pub fn give(&mut self, object: ObjectHandle, count: u64) -> Result {
        let held = self.0.get_mut(&object).ok_or(CuError::INVALID_VALUE)?;
        *held = held.checked_sub(count).ok_or(CuError::INVALID_VALUE)?;
        if *held == 0 {
            self.0.remove(&object);
        }
        Ok(())
    }

    /// Adds a reference to each object for another graph, and returns them.
    pub fn share(&self) -> Self {
        let shared = self.0.keys().filter(|object| retain(**object, 1).is_ok());
        Self(shared.map(|object| (*object, 1)).collect())
    }

    pub fn release(self) {
        for (object, count) in self.0 {
            // The object is gone if the program has released too many references.
            let _ = release(object, count);
        }
    }
}

//! Pointer to this process's session, which is null in a forked child.
//!
//! The pointer lies in a page that the kernel clears at fork (`MADV_WIPEONFORK`), so the child of an initialised
//! process finds no session, whatever its parent was doing.

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use super::mapping;

/// A pointer that is null in a forked child.
#[derive(Debug)]
pub struct WipedPointer<T: 'static> {
    page: AtomicPtr<AtomicPtr<T>>,
    /// True once the pointer was set, also in forked children.
    was_set: AtomicBool,
}

impl<T> WipedPointer<T> {
    pub const fn new() -> Self {
        Self {
            page: AtomicPtr::new(ptr::null_mut()),
            was_set: AtomicBool::new(false),
        }
    }

    /// Returns the value that was set in this process.
    #[inline]
    pub fn get(&self) -> Option<&'static T> {
        let page = self.page.load(Ordering::Acquire);
        if page.is_null() {
            return None;
        }
        // SAFETY: the page was mapped by `set`, is never unmapped, and all zeroes is a null pointer.
        let value = unsafe { (*page).load(Ordering::Acquire) };
        // SAFETY: `set` leaked the value that it stored.
        unsafe { value.as_ref() }
    }

    /// Returns true if a parent of this process had set it.
    pub fn was_lost_in_fork(&self) -> bool {
        self.was_set.load(Ordering::Acquire) && self.get().is_none()
    }

    /// Sets the value, for good. Called once.
    pub fn set(&self, value: T) -> io::Result<&'static T> {
        let page: *mut AtomicPtr<T> = mapping::wiped_page()?.cast();
        let value: &'static T = Box::leak(Box::new(value));
        // SAFETY: the page is zeroed, large enough, and no other code has its address yet.
        unsafe { (*page).store(ptr::from_ref(value).cast_mut(), Ordering::Relaxed) };
        self.was_set.store(true, Ordering::Release);
        self.page.store(page, Ordering::Release);
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_finds_nothing_and_knows_why() {
        static POINTER: WipedPointer<u64> = WipedPointer::new();
        assert_eq!(POINTER.get(), None);
        assert!(!POINTER.was_lost_in_fork());
        assert_eq!(POINTER.set(7).unwrap(), &7);
        // SAFETY: the child calls nothing but atomics and `_exit`.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let lost = POINTER.get().is_none() && POINTER.was_lost_in_fork();
            // SAFETY: ends the child without running the parent's handlers.
            unsafe { libc::_exit(i32::from(!lost)) };
        }
        let mut status = 0;
        // SAFETY: `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(
            libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
            "status {status:#x}"
        );
        assert_eq!(POINTER.get(), Some(&7));
    }
}

//! Replaces pages of a program while its threads run.
//!
//! Userfaultfd write protection (ioctl_userfaultfd(2)) blocks writers while the contents are copied, until the new
//! pages are in place. The copying code itself writes nothing to the pages meanwhile: they may hold anything, this
//! library's own data too.
//!
//! Writers of pages of a DAX device cannot be blocked so. Absent pages take the place of such pages in one step, and every
//! access waits until the contents were copied from a second mapping of the same memory ([`copy_to_absent`]).

use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::bulk::{self, Bulk, Stores};
use crate::signals::BlockedSignals;

/// Bytes of a page.
pub const PAGE: u64 = 4096;

const API: u64 = 0xAA;
/// `UFFD_FEATURE_PAGEFAULT_FLAG_WP` and `UFFD_FEATURE_WP_HUGETLBFS_SHMEM`.
pub const HOLD_FEATURES: u64 = 1 | 1 << 12;
/// `UFFD_FEATURE_WP_UNPOPULATED` (Linux 6.4): protects pages that are not present, too.
const HOLD_ALL_FEATURES: u64 = HOLD_FEATURES | 1 << 13;
const REGISTER_MODE_MISSING: u64 = 1;
const REGISTER_MODE_WP: u64 = 1 << 1;
const REGISTER_MODE_MINOR: u64 = 1 << 2;
const WRITEPROTECT_MODE_WP: u64 = 1;
/// Mode of pages to which writes block. No page of them is missing: this mode ends [`REGISTER_MODE_MINOR`].
const PROTECTED: u64 = REGISTER_MODE_WP | REGISTER_MODE_MISSING;
const UFFDIO_API: libc::c_ulong = request(3, 0x3F, size_of::<ApiArgument>());
const UFFDIO_REGISTER: libc::c_ulong = request(3, 0x00, size_of::<RegisterArgument>());
const UFFDIO_UNREGISTER: libc::c_ulong = request(2, 0x01, size_of::<RangeArgument>());
const UFFDIO_WAKE: libc::c_ulong = request(2, 0x02, size_of::<RangeArgument>());
const UFFDIO_COPY: libc::c_ulong = request(3, 0x03, size_of::<CopyArgument>());
const UFFDIO_WRITEPROTECT: libc::c_ulong = request(3, 0x06, size_of::<ProtectArgument>());
const USERFAULTFD_IOC_NEW: libc::c_ulong = request(0, 0x00, 0);

/// Returns the number of an ioctl of userfaultfd.
const fn request(direction: libc::c_ulong, number: libc::c_ulong, bytes: usize) -> libc::c_ulong {
    direction << 30 | (bytes as libc::c_ulong) << 16 | 0xAA << 8 | number
}

#[repr(C)]
struct ApiArgument {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RangeArgument {
    start: u64,
    bytes: u64,
}

#[repr(C)]
struct RegisterArgument {
    range: RangeArgument,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct ProtectArgument {
    range: RangeArgument,
    mode: u64,
}

#[repr(C)]
struct CopyArgument {
    destination: u64,
    source: u64,
    bytes: u64,
    mode: u64,
    copied: i64,
}

/// Opens a userfaultfd with these features that also blocks accesses by system calls, which needs a privilege.
pub fn descriptor(features: u64) -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    let device = || {
        OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_CLOEXEC)
            .open("/dev/userfaultfd")
    };
    // SAFETY: the system call and the request take flags. The descriptor was just made and has no other owner.
    let descriptor = unsafe {
        let mut made = libc::syscall(libc::SYS_userfaultfd, flags);
        if made < 0 {
            made = libc::ioctl(device()?.as_raw_fd(), USERFAULTFD_IOC_NEW, flags).into();
        }
        if made < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(i32::try_from(made).map_err(io::Error::other)?)
    };
    let mut argument = ApiArgument {
        api: API,
        features,
        ioctls: 0,
    };
    control(&descriptor, UFFDIO_API, &mut argument)?;
    Ok(descriptor)
}

/// Makes a request whose argument is of this type (ioctl(2)).
pub fn control<T>(
    descriptor: &impl AsRawFd,
    request: libc::c_ulong,
    argument: &mut T,
) -> io::Result<()> {
    // SAFETY: the request's argument is of this type, and the kernel reads and writes that much.
    let result = unsafe { libc::ioctl(descriptor.as_raw_fd(), request, ptr::from_mut(argument)) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn register(descriptor: &OwnedFd, range: RangeArgument, mode: u64) -> io::Result<()> {
    let mut argument = RegisterArgument {
        range,
        mode,
        ioctls: 0,
    };
    control(descriptor, UFFDIO_REGISTER, &mut argument)
}

/// Sets whether a descriptor blocks writes to registered pages. Threads that wait to write go on if it does not.
fn block_writes(descriptor: &OwnedFd, pages: Pages, block: bool) -> io::Result<()> {
    let mut argument = ProtectArgument {
        range: pages.range(),
        mode: if block { WRITEPROTECT_MODE_WP } else { 0 },
    };
    control(descriptor, UFFDIO_WRITEPROTECT, &mut argument)
}

/// Lets threads write to pages of [`Spare::protected`].
pub fn let_write(descriptor: &OwnedFd, pages: Pages) -> io::Result<()> {
    block_writes(descriptor, pages, false)
}

/// Wakes the threads that a descriptor blocks at accesses to the pages, which they then try again.
pub fn wake(descriptor: &OwnedFd, pages: Pages) -> io::Result<()> {
    control(descriptor, UFFDIO_WAKE, &mut pages.range())
}

/// Fills absent pages with the contents of readable memory at `source`, lets the threads go on that wait for them, and
/// blocks no access to them from now on. Pages that the program has unmapped meanwhile are left out. Waits while memory is
/// short, as an access to new memory does. Accesses nothing but the stack, `source` and the pages.
pub fn copy_to_absent(descriptor: &OwnedFd, pages: Pages, source: u64) -> io::Result<()> {
    /// Greatest number of bytes in one call, which keeps other threads from mapping memory.
    const MOST: u64 = 1 << 20;
    /// Pause until memory may be free again.
    const PAUSE: Duration = Duration::from_millis(1);
    let mut done = 0;
    let mut step = MOST;
    let copied = loop {
        step = step.min(pages.bytes() - done);
        if step == 0 {
            break Ok(());
        }
        let mut argument = CopyArgument {
            destination: pages.start + done,
            source: source + done,
            bytes: step,
            mode: 0,
            copied: 0,
        };
        let Err(error) = control(descriptor, UFFDIO_COPY, &mut argument) else {
            done += step;
            continue;
        };
        done += u64::try_from(argument.copied).unwrap_or(0);
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR) => {}
            Some(libc::ENOMEM) => std::thread::sleep(PAUSE),
            // Something else is mapped at some of the pages: they are filled one by one from here on.
            Some(libc::ENOENT | libc::EEXIST | libc::EINVAL) if step > PAGE => step = PAGE,
            Some(libc::ENOENT | libc::EEXIST | libc::EINVAL) => done += PAGE,
            _ => break Err(error),
        }
    };
    let range = |start, bytes| RangeArgument { start, bytes };
    let mut whole = range(pages.start, pages.bytes());
    if control(descriptor, UFFDIO_UNREGISTER, &mut whole).is_err() {
        for page in 0..pages.bytes() / PAGE {
            let mut one = range(pages.start + page * PAGE, PAGE);
            // Pages of another mapping are not registered.
            let _ = control(descriptor, UFFDIO_UNREGISTER, &mut one);
        }
    }
    // Threads may wait for pages that are not mapped here any more.
    let _ = wake(descriptor, pages);
    copied
}

/// Lets accesses to a page find zeros, if nothing fills it. Accesses nothing but the stack.
pub fn give_up(descriptor: &OwnedFd, address: u64) -> io::Result<()> {
    let start = address / PAGE * PAGE;
    let mut page = RangeArgument { start, bytes: PAGE };
    let end = start + PAGE;
    control(descriptor, UFFDIO_UNREGISTER, &mut page).or_else(|error| {
        // Nothing is mapped there any more. The access fails.
        wake(descriptor, Pages { start, end })?;
        Err(error)
    })
}

/// Returns true if this process may open such a userfaultfd.
pub fn can_hold_writers() -> bool {
    descriptor(HOLD_FEATURES).is_ok()
}

/// A range of whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    pub start: u64,
    pub end: u64,
}

impl Pages {
    /// Returns the pages that contain a range.
    pub fn around(address: u64, bytes: u64) -> Option<Self> {
        let end = address.checked_add(bytes)?.checked_next_multiple_of(PAGE)?;
        Some(Self {
            start: address / PAGE * PAGE,
            end,
        })
    }

    pub fn overlap(self, other: Self) -> bool {
        self.start < other.end && other.start < self.end
    }

    pub fn bytes(self) -> u64 {
        self.end - self.start
    }

    /// Faults all pages in (`MADV_POPULATE_WRITE`), if the kernel supports that.
    pub fn populate(self) {
        let _ = advise(self.pointer(), self.length(), libc::MADV_POPULATE_WRITE);
    }

    fn range(self) -> RangeArgument {
        RangeArgument {
            start: self.start,
            bytes: self.bytes(),
        }
    }

    fn length(self) -> usize {
        usize::try_from(self.bytes()).unwrap_or(usize::MAX)
    }

    fn pointer(self) -> *mut u8 {
        ptr::with_exposed_provenance_mut(usize::try_from(self.start).unwrap_or(0))
    }
}

/// Blocks writers of a range, and signals to this thread, because their handlers might write, until dropped.
struct Hold {
    descriptor: OwnedFd,
    range: RangeArgument,
    /// Dropped last: a handler may only run once the writers may go on.
    _signals: BlockedSignals,
}

impl Hold {
    fn new(pages: Pages, mappings: &[Pages]) -> io::Result<Self> {
        let descriptor = Self::descriptor(pages)?;
        let range = pages.range();
        register(&descriptor, range, REGISTER_MODE_WP)?;
        let hold = Self {
            descriptor,
            range,
            _signals: BlockedSignals::new(),
        };
        // Linux 6.1 protects one mapping a call.
        for mapping in mappings {
            block_writes(&hold.descriptor, *mapping, true)?;
        }
        Ok(hold)
    }

    /// Opens a descriptor that can hold writers of all the pages.
    fn descriptor(pages: Pages) -> io::Result<OwnedFd> {
        static NEEDS_PRESENT: AtomicBool = AtomicBool::new(false);
        if !NEEDS_PRESENT.load(Ordering::Relaxed) {
            // Fails if any of the pages is not mapped.
            advise(pages.pointer(), pages.length(), libc::MADV_WILLNEED)?;
            match descriptor(HOLD_ALL_FEATURES) {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    NEEDS_PRESENT.store(true, Ordering::Relaxed);
                }
                opened => return opened,
            }
        }
        advise(pages.pointer(), pages.length(), libc::MADV_POPULATE_WRITE)?;
        descriptor(HOLD_FEATURES)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Lifts the protection where the pages are still the old ones. This and closing the descriptor wake the blocked
        // writers, which continue with the pages mapped then.
        let _ = control(&self.descriptor, UFFDIO_UNREGISTER, &mut { self.range });
    }
}

/// Memory that is to replace pages.
#[derive(Debug)]
pub struct Spare {
    address: *mut u8,
    length: usize,
    /// Advice that faults all of it in.
    fault_in: Option<i32>,
}

// SAFETY: a mapping belongs to the process, to no thread of it.
unsafe impl Send for Spare {}

impl Spare {
    /// Maps a part of a file, which forked children do not inherit.
    pub fn shared(file: &File, offset: u64, bytes: u64) -> io::Result<Self> {
        let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
        let mut spare = Self::map(bytes, libc::MAP_SHARED, file.as_raw_fd(), offset)?;
        spare.advise(libc::MADV_DONTFORK)?;
        // A read maps the pages around it too, writable as the mapping is.
        spare.fault_in = Some(libc::MADV_POPULATE_READ);
        Ok(spare)
    }

    /// Maps memory without pages, at whose accesses a descriptor blocks. Forked children do not inherit it.
    pub fn missing(descriptor: &OwnedFd, bytes: u64) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let spare = Self::map(bytes, flags, -1, 0)?;
        spare.advise(libc::MADV_DONTFORK)?;
        // Fails for locked memory (mlockall(2)), whose pages are there from the start.
        spare.advise(libc::MADV_DONTNEED)?;
        spare.without_pages(descriptor)
    }

    /// Maps private memory without pages, as the program's own, at whose accesses a descriptor blocks.
    pub fn absent(descriptor: &OwnedFd, bytes: u64) -> io::Result<Self> {
        let spare = Self::private(bytes)?;
        // Locked memory (mlockall(2)) has its pages from the start.
        spare.advise(libc::MADV_DONTNEED_LOCKED)?;
        spare.without_pages(descriptor)
    }

    /// Has a descriptor block accesses to the memory.
    fn without_pages(self, descriptor: &OwnedFd) -> io::Result<Self> {
        register(descriptor, self.pages().range(), REGISTER_MODE_MISSING)?;
        Ok(self)
    }

    /// Maps a part of a file with all its pages, at whose writes a descriptor blocks, made with [`HOLD_FEATURES`]. Forked
    /// children do not inherit it.
    pub fn protected(
        descriptor: &OwnedFd,
        file: &File,
        offset: u64,
        bytes: u64,
    ) -> io::Result<Self> {
        let spare = Self::shared(file, offset, bytes)?;
        // Before the registration, after which each page is a fault of its own. Without holes in the file no page of it is
        // ever missing.
        spare.populate()?;
        register(descriptor, spare.pages().range(), PROTECTED)?;
        block_writes(descriptor, spare.pages(), true)?;
        Ok(spare)
    }

    /// Moves pages of [`Spare::protected`] out of the way in one step, with what the page tables have of them. Accesses to
    /// their place block from then on.
    ///
    /// # Errors
    /// Some of the pages are another mapping's. Accesses to pages that are not there may block.
    ///
    /// # Safety
    /// The pages belong to this library, which serves accesses to them from now on.
    pub unsafe fn aside(descriptor: &OwnedFd, pages: Pages) -> io::Result<Self> {
        let missing = Self::missing(descriptor, pages.bytes())?;
        let place = Self::free_place(pages.bytes())?;
        // Until the missing pages are there, this mode blocks accesses.
        register(
            descriptor,
            pages.range(),
            REGISTER_MODE_WP | REGISTER_MODE_MINOR,
        )?;
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
        let (from, length) = (pages.pointer().cast(), pages.length());
        // SAFETY: the caller's promise.
        let spare = unsafe {
            let moved = libc::mremap(from, length, length, flags, place);
            if moved == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            let spare = Self {
                address: moved.cast(),
                length,
                fault_in: None,
            };
            missing.take_place_of(pages)?;
            spare
        };
        register(descriptor, spare.pages().range(), PROTECTED)?;
        Ok(spare)
    }

    /// Returns an address at which memory is free now, and at which page tables can be moved whole.
    fn free_place(bytes: u64) -> io::Result<*mut libc::c_void> {
        /// Bytes that one page table maps.
        const TABLE: usize = 2 << 20;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let room = Self::map(bytes.saturating_add(TABLE as u64), flags, -1, 0)?;
        Ok(room
            .address
            .map_addr(|address| address.next_multiple_of(TABLE))
            .cast())
    }

    /// Blocks writes to a part of the pages again, which are [`aside`](Self::aside).
    pub fn protect(&self, descriptor: &OwnedFd, offset: u64, bytes: u64) -> io::Result<()> {
        let start = self.start() + offset;
        let end = start + bytes;
        block_writes(descriptor, Pages { start, end }, true)
    }

    /// Maps anonymous private memory.
    pub fn private(bytes: u64) -> io::Result<Self> {
        Self::map(bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    }

    fn map(bytes: u64, flags: i32, file: i32, offset: libc::off_t) -> io::Result<Self> {
        let length = usize::try_from(bytes).map_err(io::Error::other)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping wherever the kernel likes.
        let address = unsafe { libc::mmap(ptr::null_mut(), length, access, flags, file, offset) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            address: address.cast(),
            length,
            fault_in: Some(libc::MADV_POPULATE_WRITE),
        })
    }

    fn start(&self) -> u64 {
        self.address.addr() as u64
    }

    pub fn pages(&self) -> Pages {
        Pages {
            start: self.start(),
            end: self.start() + self.length as u64,
        }
    }

    /// Faults all of it in, so that copying does not have to, and starts threads that help to copy.
    fn prepare(&self) -> io::Result<()> {
        if self.length >= bulk::LARGE {
            bulk::start(self.length);
        }
        self.populate()
    }

    fn populate(&self) -> io::Result<()> {
        self.fault_in.map_or(Ok(()), |advice| self.advise(advice))
    }

    /// Gives advice that changes no contents. Of new memory, `MADV_DONTNEED` is such: it reads as zeros before and after.
    fn advise(&self, advice: i32) -> io::Result<()> {
        advise(self.address, self.length, advice)
    }

    /// Copies the pages into the spare memory. The caller may hold writers of the pages: no more is written meanwhile than the
    /// spare memory, the calling thread's own memory ([`are_own`]), and what [`Bulk::copy_shared`] keeps apart from them.
    ///
    /// # Safety
    /// The pages are readable, and as long as the spare memory.
    pub unsafe fn copy_from(&self, pages: Pages) {
        let is_large = self.length >= bulk::LARGE;
        let stores = if is_large {
            Stores::Streaming
        } else {
            Stores::Cached
        };
        // SAFETY: the caller's promise; only this object uses the spare memory.
        let bulk = unsafe { Bulk::new(self.address, pages.pointer(), self.length, stores) };
        if is_large {
            bulk.copy_shared(Some(pages));
        } else {
            bulk.copy_alone();
        }
    }

    /// Replaces the pages in one step (`mremap`); the old pages are unmapped.
    ///
    /// # Safety
    /// The pages belong to the program and are as long as the spare memory. Their contents equal the spare memory's, or
    /// may be lost.
    pub unsafe fn take_place_of(self, pages: Pages) -> io::Result<()> {
        // SAFETY: the caller's promise.
        let moved = unsafe {
            libc::mremap(
                self.address.cast(),
                self.length,
                self.length,
                libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
                pages.pointer(),
            )
        };
        if moved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // The mapping has moved, so its old address must not be unmapped.
        std::mem::forget(self);
        Ok(())
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        // SAFETY: this object's own mapping, to which no other pointer exists.
        unsafe { libc::munmap(self.address.cast(), self.length) };
    }
}

/// Bytes reserved for stack frames of the replacing code, on either side of its first frame.
const FRAMES: u64 = 32 << 10;
/// Bytes of the C library's and the kernel's thread data behind `pthread_self`.
const THREAD: u64 = PAGE;

/// Returns true if the calling thread, or the kernel for it, may write to the pages while it replaces them: they
/// overlap its stack or its C library's thread data (the main thread's data lie outside its stack).
pub fn are_own(pages: Pages) -> io::Result<bool> {
    Ok(own()?.into_iter().any(|own| own.overlap(pages)))
}

/// Returns the pages that the calling thread, or the kernel for it, may write to at any time.
pub fn own() -> io::Result<[Pages; 3]> {
    let stack = stack()?;
    // Memory right beside the stack is not the thread's.
    let or_stack = |address: u64, own: Pages| match (stack.start..stack.end).contains(&address) {
        true => stack,
        false => own,
    };
    // A program may have put the thread on a stack of its own making.
    let frame = (&raw const stack).addr() as u64;
    let frames = Pages::around(frame.saturating_sub(FRAMES), 2 * FRAMES);
    let frames = frames.ok_or_else(|| io::Error::other("no frames"))?;
    let kept = kept_of_thread()?;
    let (frames, kept) = (or_stack(frame, frames), or_stack(kept.start, kept));
    Ok([stack, frames, kept])
}

/// Returns the pages of the calling thread's data that the C library and the kernel write at any time: its descriptor,
/// `errno`, and the area that the kernel writes when it migrates the thread (rseq(2)).
fn kept_of_thread() -> io::Result<Pages> {
    // SAFETY: plain calls; the C library's variable is an integer of this kind, and is never written again.
    let (thread, errno, restartable) = unsafe {
        let offset = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()).cast::<isize>();
        let thread = libc::pthread_self();
        let restartable = if offset.is_null() {
            thread
        } else {
            thread.wrapping_add_signed(*offset as i64)
        };
        (thread, libc::__errno_location().addr() as u64, restartable)
    };
    let first = thread.min(errno).min(restartable);
    let last = thread.max(errno).max(restartable);
    Pages::around(first, last - first + THREAD).ok_or_else(|| io::Error::other("no thread"))
}

/// Returns the stack of the calling thread; for a thread other than the main one it contains the thread-local memory. The C
/// library reads all mappings for that of the main thread, so each thread asks once.
fn stack() -> io::Result<Pages> {
    thread_local! {
        static STACK: Cell<Option<Pages>> = const { Cell::new(None) };
    }
    if let Some(known) = STACK.get() {
        return Ok(known);
    }
    let found = find_stack()?;
    STACK.set(Some(found));
    Ok(found)
}

fn find_stack() -> io::Result<Pages> {
    let (mut address, mut bytes) = (ptr::null_mut(), 0);
    // SAFETY: the attributes are filled in before they are read, and destroyed once.
    let result = unsafe {
        let mut attributes = std::mem::zeroed();
        let result = libc::pthread_getattr_np(libc::pthread_self(), &raw mut attributes);
        if result == 0 {
            libc::pthread_attr_getstack(&raw const attributes, &raw mut address, &raw mut bytes);
            libc::pthread_attr_destroy(&raw mut attributes);
        }
        result
    };
    if result != 0 {
        return Err(io::Error::from_raw_os_error(result));
    }
    Pages::around(address.addr() as u64, bytes as u64).ok_or_else(|| io::Error::other("no stack"))
}

fn advise(address: *mut u8, length: usize, advice: i32) -> io::Result<()> {
    // SAFETY: the callers of this module give advice that changes no contents.
    if unsafe { libc::madvise(address.cast(), length, advice) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Copies the pages, which are these `mappings`, to spare memory and maps that in their place. No write through this
/// process's page tables is lost, by a thread or by a system call: it happens before the copy, or waits and happens after.
/// A user that has pinned the old pages before (a direct read under way, buffers registered with io_uring or RDMA) goes on
/// writing to them, which the program does not see. On failure nothing changes.
///
/// # Safety
/// The pages are mapped readable and writable, they are not the calling thread's own ([`are_own`]), and the spare
/// memory is as large.
pub unsafe fn replace(pages: Pages, mappings: &[Pages], spare: Spare) -> io::Result<()> {
    spare.prepare()?;
    let hold = Hold::new(pages, mappings)?;
    // SAFETY: the caller's promise; writers are held off, so the copy is what the pages hold until they go.
    let result = unsafe {
        spare.copy_from(pages);
        spare.take_place_of(pages)
    };
    drop(hold);
    result
}

/// As [`replace`], for pages of one mapping, and returns the old pages. With them the memory comes back without new pages.
///
/// # Safety
/// As for [`replace`].
pub unsafe fn exchange(pages: Pages, spare: Spare) -> io::Result<Spare> {
    spare.prepare()?;
    let hold = Hold::new(pages, &[pages])?;
    let (length, flags) = (
        pages.length(),
        libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP,
    );
    let (place, anywhere) = (pages.pointer().cast(), ptr::null_mut::<libc::c_void>());
    // SAFETY: the caller's promise; writers are held off, and all accesses from the second line on. Nothing else uses the
    // old pages where they lie then.
    unsafe {
        spare.copy_from(pages);
        register(
            &hold.descriptor,
            hold.range,
            REGISTER_MODE_WP | REGISTER_MODE_MISSING,
        )?;
        let moved = libc::mremap(place, length, length, flags, anywhere);
        if moved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let old = Spare {
            address: moved.cast(),
            length,
            fault_in: None,
        };
        // Each page that was protected against writes would fault once. This lets all be written again.
        libc::mprotect(moved, length, libc::PROT_READ);
        libc::mprotect(moved, length, libc::PROT_READ | libc::PROT_WRITE);
        if let Err(error) = spare.take_place_of(pages) {
            copy_to_absent(&hold.descriptor, pages, old.start())?;
            return Err(error);
        }
        Ok(old)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;
    use crate::faults::Faults;

    const COUNT: usize = 16;
    /// Words of a page.
    const WORDS: usize = 512;
    /// Factor that makes different words of different numbers.
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

    /// Returns true if this process may use userfaultfd; prints that the test is skipped otherwise.
    fn holds_writers() -> bool {
        let is_root = rustix::process::geteuid().is_root();
        let open = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
        let may = is_root || open.is_ok_and(|text| text.trim() == "1");
        let can = can_hold_writers();
        assert!(can || !may, "userfaultfd does not work");
        if !can {
            eprintln!("skipped: this process may not use userfaultfd");
        }
        can
    }

    fn file(bytes: u64) -> File {
        let file = File::from(memfd_create(c"t", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(bytes).unwrap();
        file
    }

    /// Maps pages for a test, which stay mapped.
    fn pages() -> Pages {
        mapped(COUNT as u64 * PAGE)
    }

    fn mapped(bytes: u64) -> Pages {
        kept(Spare::private(bytes).unwrap())
    }

    /// Leaves memory mapped for good.
    fn kept(spare: Spare) -> Pages {
        let pages = spare.pages();
        spare.address.expose_provenance();
        std::mem::forget(spare);
        pages
    }

    /// Returns all words of pages.
    fn all_words(pages: Pages) -> &'static [AtomicU64] {
        let first = pages.pointer().cast();
        // SAFETY: the pages stay mapped as long as the test uses the words, and only atomically.
        unsafe { std::slice::from_raw_parts(first, pages.length() / size_of::<AtomicU64>()) }
    }

    /// Returns the first word of each page.
    fn words(pages: Pages) -> Vec<&'static AtomicU64> {
        all_words(pages).iter().step_by(WORDS).collect()
    }

    #[test]
    fn pages_around_a_range() {
        let around =
            |address, bytes| Pages::around(address, bytes).map(|pages| (pages.start, pages.end));
        assert_eq!(around(0x1fff, 2), Some((0x1000, 0x3000)));
        assert_eq!(around(0x1000, 0x1000), Some((0x1000, 0x2000)));
        assert_eq!(around(u64::MAX - 10, 5), None);
        assert_eq!(around(u64::MAX - 10, 20), None);
    }

    #[test]
    fn memory_beside_the_stack_of_a_thread_is_not_its_own() {
        let thread = std::thread::spawn(|| {
            let [stack, ..] = own().unwrap();
            for (start, is_own) in [
                (stack.start - PAGE, false),
                (stack.start, true),
                (stack.end - PAGE, true),
                (stack.end, false),
            ] {
                let end = start + PAGE;
                assert_eq!(
                    are_own(Pages { start, end }).unwrap(),
                    is_own,
                    "{start:#x} of {stack:?}"
                );
            }
        });
        thread.join().unwrap();
    }

    #[test]
    fn no_write_is_lost_while_pages_are_replaced_back_and_forth() {
        if !holds_writers() {
            return;
        }
        let pages = pages();
        let file = file(pages.bytes());
        let stop = Arc::new(AtomicBool::new(false));
        // Writers that have been at work before anything is replaced.
        let at_work = Arc::new(AtomicU32::new(0));
        // One writer by instructions, one by system calls.
        let (to_stop, works) = (Arc::clone(&stop), Arc::clone(&at_work));
        let adder = std::thread::spawn(move || {
            let words = words(pages);
            let mut rounds = 0_u64;
            while !to_stop.load(Ordering::Relaxed) {
                for word in &words {
                    // Not an atomic addition: a lost write shows.
                    word.store(word.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                }
                rounds += 1;
                if rounds == 1 {
                    works.fetch_add(1, Ordering::Relaxed);
                }
            }
            rounds
        });
        let (to_stop, works) = (Arc::clone(&stop), Arc::clone(&at_work));
        let caller = std::thread::spawn(move || {
            let (reader, writer) = io::pipe().unwrap();
            let mut round = 0_usize;
            while !to_stop.load(Ordering::Relaxed) {
                round += 1;
                let sent = round.to_ne_bytes();
                // SAFETY: both buffers have eight bytes; the second lies in the pages.
                unsafe {
                    let place = pages.pointer().add(8 + (round % COUNT) * 4096);
                    assert_eq!(
                        libc::write(writer.as_fd().as_raw_fd(), sent.as_ptr().cast(), 8),
                        8
                    );
                    assert_eq!(libc::read(reader.as_fd().as_raw_fd(), place.cast(), 8), 8);
                    assert_eq!(place.cast::<usize>().read_volatile(), round);
                }
                if round == 1 {
                    works.fetch_add(1, Ordering::Relaxed);
                }
            }
            round
        });
        while at_work.load(Ordering::Relaxed) < 2 {
            assert!(!adder.is_finished() && !caller.is_finished());
            std::thread::yield_now();
        }
        // In a VM the pages of the file come back by way of absent pages.
        let faults: &Faults = Box::leak(Box::new(Faults::open().unwrap()));
        let events = move || while faults.next().is_ok() {};
        std::thread::spawn(events);
        let second = Spare::shared(&file, 0, pages.bytes()).unwrap();
        let source = second.address.expose_provenance() as u64;
        for round in 0..600 {
            let spare = Spare::shared(&file, 0, pages.bytes()).unwrap();
            // SAFETY: the test's own pages; the file is mapped at `source` too.
            unsafe {
                if round % 3 == 0 {
                    let old = exchange(pages, spare).unwrap();
                    replace(pages, &[pages], old).unwrap();
                    continue;
                }
                replace(pages, &[pages], spare).unwrap();
                match round % 3 {
                    1 => replace(pages, &[pages], Spare::private(pages.bytes()).unwrap()).unwrap(),
                    _ => faults.bring_back(pages, source).unwrap(),
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
        let rounds = adder.join().unwrap();
        assert!(caller.join().unwrap() > 0 && rounds > 0);
        for word in words(pages) {
            assert_eq!(word.load(Ordering::Relaxed), rounds);
        }
    }

    #[test]
    fn an_access_to_an_absent_page_that_nothing_fills_finds_zeros() {
        if !holds_writers() {
            return;
        }
        let faults: &Faults = Box::leak(Box::new(Faults::open().unwrap()));
        std::thread::spawn(move || {
            while let Ok(event) = faults.next() {
                if let Some(access) = event {
                    faults.end_stray(access.address);
                }
            }
        });
        // As after a move of pages that are about to be filled, which stay absent at their new place.
        let pages = kept(faults.missing(COUNT as u64 * PAGE).unwrap());
        for word in words(pages) {
            assert_eq!(word.fetch_add(1, Ordering::Relaxed), 0);
        }
        assert!(faults.take_strays());
        assert!(!faults.take_strays());
    }

    /// Shows two parts of a file side by side, takes both away at once and puts them back, while threads write to them. The
    /// serving thread lets them write only while the pages are there.
    #[test]
    fn writes_to_protected_pages_are_noticed_wherever_these_have_been() {
        if !holds_writers() {
            return;
        }
        let faults: &Faults = Box::leak(Box::new(Faults::open().unwrap()));
        let (pages, half) = (pages(), COUNT as u64 / 2 * PAGE);
        let file = file(pages.bytes());
        let (noticed, events) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            while let Ok(event) = faults.next() {
                if let Some(access) = event {
                    noticed.send((access.address, access.writes)).unwrap();
                    if access.writes {
                        faults.let_write(pages).unwrap();
                    }
                }
            }
        });
        let store = |page: usize, value| words(pages)[page].store(value, Ordering::Relaxed);
        let load = |page: usize| words(pages)[page].load(Ordering::Relaxed);
        // SAFETY: the test's own pages, whose accesses the thread serves.
        unsafe {
            for start in [pages.start, pages.start + half] {
                let end = start + half;
                let shown = faults.protected(&file, start - pages.start, half).unwrap();
                shown.take_place_of(Pages { start, end }).unwrap();
            }
            for turn in 1..5 {
                for page in 0..COUNT {
                    assert_eq!(load(page), turn - 1);
                }
                assert!(events.try_recv().is_err(), "no read is noticed");
                for page in 0..COUNT {
                    store(page, turn);
                }
                assert_eq!(
                    events.try_recv(),
                    Ok((pages.start, true)),
                    "the first write"
                );
                assert!(events.try_recv().is_err(), "no other");
                let aside = Spare::aside(faults.descriptor(), pages).unwrap();
                let reader = std::thread::spawn(move || words(pages)[0].load(Ordering::Relaxed));
                assert_eq!(events.recv(), Ok((pages.start, false)), "it is absent");
                faults.protect(&aside, 0, pages.bytes()).unwrap();
                aside.take_place_of(pages).unwrap();
                faults.wake(pages).unwrap();
                assert_eq!(reader.join().unwrap(), turn);
            }
        }
    }

    #[test]
    fn what_is_in_place_is_the_file() {
        if !holds_writers() {
            return;
        }
        let pages = pages();
        let file = file(2 * pages.bytes());
        words(pages)[3].store(77, Ordering::Relaxed);
        let spare = Spare::shared(&file, pages.bytes(), pages.bytes()).unwrap();
        // SAFETY: the test's own pages.
        unsafe { replace(pages, &[pages], spare) }.unwrap();
        let other = Spare::shared(&file, pages.bytes(), pages.bytes()).unwrap();
        let there = words(other.pages());
        assert_eq!(there[3].load(Ordering::Relaxed), 77);
        words(pages)[4].store(78, Ordering::Relaxed);
        assert_eq!(there[4].load(Ordering::Relaxed), 78);
    }

    /// Moves pages to a file and back, with the old pages and with new ones, and compares all that the calling thread does not
    /// write meanwhile: the first word of each page.
    fn check_all_bytes(bytes: u64, seed: u64) {
        let pages = mapped(bytes);
        let file = file(bytes);
        let second = Spare::shared(&file, 0, bytes).unwrap();
        let (own, there) = (all_words(pages), all_words(second.pages()));
        let others = || (0..own.len()).filter(|n| n % WORDS != 0);
        let value = |n: usize, step: u64| (n as u64 ^ seed ^ step << 48).wrapping_mul(ODD);
        let fill = |step| others().for_each(|n| own[n].store(value(n, step), Ordering::Relaxed));
        let check = |words: &[AtomicU64], step| {
            let wrong = others().find(|n| words[*n].load(Ordering::Relaxed) != value(*n, step));
            assert_eq!(wrong, None, "{bytes} bytes, step {step}");
        };
        let move_there_and_back = || {
            for round in 0..3 {
                let (first, next) = (2 * round, 2 * round + 1);
                fill(first);
                let spare = Spare::shared(&file, 0, bytes).unwrap();
                // SAFETY: the test's own pages.
                unsafe {
                    let old = if round == 1 {
                        replace(pages, &[pages], spare).unwrap();
                        Spare::private(bytes).unwrap()
                    } else {
                        exchange(pages, spare).unwrap()
                    };
                    check(own, first);
                    check(there, first);
                    fill(next);
                    replace(pages, &[pages], old).unwrap();
                }
                check(own, next);
            }
        };
        std::thread::scope(|scope| {
            let mover = scope.spawn(move_there_and_back);
            let mut rounds = 0;
            while !mover.is_finished() {
                for word in own.iter().step_by(WORDS) {
                    word.store(word.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                }
                rounds += 1;
            }
            for word in own.iter().step_by(WORDS) {
                assert_eq!(word.load(Ordering::Relaxed), rounds);
            }
        });
    }

    #[test]
    fn all_bytes_of_large_pages_move_there_and_back_beside_those_of_other_threads() {
        const LARGE: u64 = bulk::LARGE as u64;
        if !holds_writers() {
            return;
        }
        // Threads help from here on.
        bulk::start(bulk::LARGE);
        let sizes = [
            PAGE,
            LARGE - PAGE,
            LARGE,
            LARGE + PAGE,
            LARGE + 7 * PAGE,
            2 * LARGE + 3 * PAGE,
        ];
        std::thread::scope(|scope| {
            for thread in 0..3 {
                scope.spawn(move || {
                    for bytes in sizes.into_iter().cycle().skip(2 * thread).take(sizes.len()) {
                        check_all_bytes(bytes, bytes + thread as u64);
                    }
                });
            }
        });
    }

    /// Half of the pages have never been used.
    #[test]
    fn pages_that_are_exchanged_come_back_with_what_the_others_got() {
        if !holds_writers() {
            return;
        }
        let pages = pages();
        let half = COUNT / 2;
        for (page, word) in (0..).zip(&words(pages)[..half]) {
            word.store(page, Ordering::Relaxed);
        }
        let file = file(pages.bytes());
        let spare = Spare::shared(&file, 0, pages.bytes()).unwrap();
        // SAFETY: the test's own pages.
        unsafe {
            let old = exchange(pages, spare).unwrap();
            for (page, word) in (0..).zip(words(pages)) {
                let was = if page < half as u64 { page } else { 0 };
                assert_eq!(word.swap(100 + page, Ordering::Relaxed), was);
            }
            replace(pages, &[pages], old).unwrap();
        }
        for (page, word) in (0..).zip(words(pages)) {
            assert_eq!(word.load(Ordering::Relaxed), 100 + page);
        }
    }

    #[test]
    fn what_cannot_be_replaced_stays() {
        if !holds_writers() {
            return;
        }
        let pages = pages();
        words(pages)[0].store(5, Ordering::Relaxed);
        let hole = Pages {
            start: pages.start + PAGE,
            end: pages.start + 2 * PAGE,
        };
        let spare = Spare::private(pages.bytes()).unwrap();
        // SAFETY: the test's own pages. One of them is not mapped then, which is noticed.
        let replaced = unsafe {
            libc::munmap(hole.pointer().cast(), hole.length());
            replace(pages, &[pages], spare)
        };
        assert!(replaced.is_err());
        let word = words(pages)[0];
        word.store(word.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        assert_eq!(word.load(Ordering::Relaxed), 6, "and can be written again");
    }
}

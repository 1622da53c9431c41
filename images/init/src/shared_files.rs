//! Serves `/dev/shm` from memory that the backend's workers reach: a file system whose files are mapped directly (DAX), without
//! a page cache.
//!
//! The keeper tells a process in which parts of that memory a file lies, so that the process can register the file for its
//! device, and holds the file open meanwhile. A process may be killed while its device writes to the file. If nobody else
//! has the file, its blocks would then become another file's before the process's worker has ended. So the keeper holds files
//! until the backend has given up the process's session.
//!
//! [`wormhole_ring::shared_files`] has the messages.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{self, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::ops::Deref;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::linux::fs::MetadataExt;
use std::os::unix::fs::{FileExt, FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recvmsg, socket_with,
};

use wormhole_ring::layout::{SEGMENT_BYTES, session::GENERATION};
use wormhole_ring::shared_files::{Answer, MARK, MESSAGE_BYTES, MOST_PARTS, Part, Request, SOCKET};

use crate::{ext4, mount_one};

/// The memory's device is `pmem` with a number.
const BLOCK_DEVICES: &str = "/sys/class/block";
const NODES: &str = "/dev";
const MEMORY_MAP: &str = "/proc/iomem";
const CHARACTER_DEVICES: &str = "/sys/dev/char";
const DRIVER: &str = "/sys/bus/nd/drivers/nd_pmem";
const PLACE: &str = "/dev/shm";
/// Place of the first file system for shared memory. It has no device's memory. A C library before glibc 2.34 makes
/// shared memory in a tmpfs only, the first one that is mounted.
const FIRST_PLACE: &str = "/dev/shm.tmpfs";
/// Time for the kernel to find the device.
const FOUND_WITHIN: Duration = Duration::from_secs(5);
/// Name of the memory in `/proc/iomem`.
const NAME: &str = "Persistent Memory (legacy)";
/// Most processes that have registered files, and most files of all of them. Each process has a stream and a window here.
const MOST_PROCESSES: usize = 256;
const MOST_FILES: usize = 256;
/// Most processes of one user other than root, more than a backend gives sessions to, and most files of them. The descriptors that
/// a user sends may never close, and then take that user's places alone.
const MOST_OF_USER: usize = 96;
/// Most streams of processes without a place that are being closed. One user's processes, files and all of these take 640
/// descriptors, while the first process of a guest may have 1,024.
const MOST_REFUSED: usize = 256;
/// Time that a process has for its first message.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// Pause between two looks at a session that ends.
const PAUSE: Duration = Duration::from_millis(2);

#[derive(Debug, thiserror::Error)]
pub enum SharedFilesError {
    #[error(
        "the kernel lacks nd_pmem, the driver of the memory for shared files: load it, or build an older image of Wormhole again \
         with `wormhole image build guest --rebuild`"
    )]
    NoDriver,
    #[error("the kernel made no device of the memory for shared files")]
    NoDevice,
    #[error("{0} is no memory that a launcher of Wormhole has given this guest: it stays as it is")]
    Foreign(String),
    #[error("no file system can be made on {path}: {source}")]
    Format { path: String, source: io::Error },
    #[error(
        "{0} has files, which a file system over it would hide from programs that look for them: restart the guest, whose \
         service wormhole-guest-files mounts it before programs run"
    )]
    InUse(&'static str),
    #[error("cannot mount the memory for shared files at {PLACE}: {0}")]
    Mount(io::Error),
    #[error("the keeper of shared files cannot serve: {0}")]
    Serve(io::Error),
}

/// Returns whether this machine has memory for shared files.
#[must_use]
pub fn is_there() -> bool {
    memories() != 0
}

/// Returns the number of such memories of this machine. Each may be that of shared files.
fn memories() -> usize {
    let map = fs::read_to_string(MEMORY_MAP).unwrap_or_default();
    map.lines().filter(|line| line.ends_with(NAME)).count()
}

/// Makes an empty file system for shared memory, mounts it, and starts the keeper. Programs must not run yet.
///
/// # Errors
/// The memory's device is missing, or cannot be mounted so that files are mapped directly.
pub fn start() -> Result<(), SharedFilesError> {
    let path = format()?;
    let mounted = fs::create_dir_all(FIRST_PLACE)
        .and_then(|()| mount_one("", PLACE, FIRST_PLACE, libc::MS_MOVE, ""))
        .and_then(|()| {
            // The place keeps its first file system.
            mount(&path).inspect_err(|_| drop(mount_one("", FIRST_PLACE, PLACE, libc::MS_MOVE, "")))
        });
    mounted.map_err(SharedFilesError::Mount)?;
    let keeper = Keeper::listen()?;
    let started = thread::Builder::new().spawn(move || keeper.run());
    started.map(drop).map_err(SharedFilesError::Serve)
}

/// Makes an empty file system for shared memory and mounts it over the first one, unless it is there already. Programs must not
/// run yet.
///
/// # Errors
/// As [`start`]. The first one has files.
pub fn mount_over() -> Result<(), SharedFilesError> {
    if is_mounted() {
        return Ok(());
    }
    if !is_empty(Path::new(PLACE)).map_err(SharedFilesError::Mount)? {
        return Err(SharedFilesError::InUse(PLACE));
    }
    mount(&format()?).map_err(SharedFilesError::Mount)
}

/// Returns whether a folder has no files.
fn is_empty(folder: &Path) -> io::Result<bool> {
    Ok(fs::read_dir(folder)?.next().is_none())
}

/// Returns whether the memory's file system is mounted for shared memory.
#[must_use]
pub fn is_mounted() -> bool {
    let found = find(Path::new(BLOCK_DEVICES), Path::new(NODES)).marked;
    let device = found.and_then(|found| fs::metadata(found.node).ok());
    let place = fs::metadata(PLACE).ok();
    let both = device.zip(place);
    both.is_some_and(|(device, place)| device.st_rdev() == place.st_dev())
}

fn mount(device: &str) -> io::Result<()> {
    let flags = libc::MS_NOSUID | libc::MS_NODEV;
    mount_one("ext4", device, PLACE, flags, "dax,noinit_itable")
}

/// Makes an empty file system. Returns the path of its device.
fn format() -> Result<String, SharedFilesError> {
    let Memory { node, bytes } = wait_for_device()?;
    let formatted = File::options().read(true).write(true).open(&node);
    let formatted = formatted.and_then(|device| {
        ext4::format(&device, bytes)?;
        device.sync_all()
    });
    match formatted {
        Ok(()) => Ok(node),
        Err(source) => Err(SharedFilesError::Format { path: node, source }),
    }
}

/// Returns whether a launcher of Wormhole has made the memory. Other memory of this kind may have a file system of its own. The
/// mark lies before the file system, which leaves it.
fn is_marked(device: &File) -> io::Result<bool> {
    let mut first = [0; MARK.len()];
    device.read_exact_at(&mut first, 0)?;
    Ok(first == MARK)
}

/// Device of the memory.
#[derive(Debug, PartialEq, Eq)]
struct Memory {
    node: String,
    bytes: u64,
}

/// Devices of such memory.
#[derive(Debug, Default)]
struct Devices {
    /// The one that a launcher of Wormhole has made.
    marked: Option<Memory>,
    /// All others.
    foreign: Vec<String>,
}

/// Waits until the kernel has made the device, in which it takes turns with others.
fn wait_for_device() -> Result<Memory, SharedFilesError> {
    if !Path::new(DRIVER).exists() {
        return Err(SharedFilesError::NoDriver);
    }
    let end = Instant::now() + FOUND_WITHIN;
    loop {
        let Devices { marked, foreign } = find(Path::new(BLOCK_DEVICES), Path::new(NODES));
        if let Some(memory) = marked {
            return Ok(memory);
        }
        let is_last = Instant::now() > end;
        let all_are_there = foreign.len() >= memories();
        match foreign.into_iter().next_back() {
            // No other one comes.
            Some(node) if is_last || all_are_there => return Err(SharedFilesError::Foreign(node)),
            None if is_last => return Err(SharedFilesError::NoDevice),
            _ => thread::sleep(PAUSE),
        }
    }
}

/// Finds the devices of such memory, without their partitions. One whose node cannot be read is not there yet.
fn find(devices: &Path, nodes: &Path) -> Devices {
    let mut found = Devices::default();
    for entry in fs::read_dir(devices).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        if !name.starts_with("pmem") || entry.path().join("partition").exists() {
            continue;
        }
        let sectors = fs::read_to_string(entry.path().join("size")).unwrap_or_default();
        let bytes = sectors
            .trim()
            .parse::<u64>()
            .unwrap_or(0)
            .saturating_mul(512);
        let node = nodes.join(name).display().to_string();
        match File::open(&node).and_then(|device| is_marked(&device)) {
            Ok(true) if bytes != 0 => found.marked = Some(Memory { node, bytes }),
            Ok(false) if bytes != 0 => found.foreign.push(node),
            _ => {}
        }
    }
    found
}

/// Keeper of the files.
#[derive(Debug)]
pub struct Keeper {
    listener: UnixListener,
    /// Number of the file system's device.
    device: u64,
}

impl Keeper {
    /// Makes the socket to which processes of this process's user and group connect.
    ///
    /// # Errors
    /// Another process has it.
    pub fn listen() -> Result<Self, SharedFilesError> {
        let listener = listen_at(Path::new(SOCKET)).map_err(SharedFilesError::Serve)?;
        let status = fs::metadata(PLACE).map_err(SharedFilesError::Serve)?;
        let device = status.st_dev();
        Ok(Self { listener, device })
    }

    /// Serves processes, each in a thread of its own.
    pub fn run(self) -> ! {
        let device = self.device;
        let mut users = BTreeMap::new();
        let mut refusals = Refusals::new(MOST_REFUSED);
        loop {
            // Other processes wait, as long as they like.
            let (place, refusal) = loop {
                let place = Counted::take(&PROCESSES, MOST_PROCESSES);
                match place.zip(refusals.take()) {
                    Some(places) => break places,
                    None => thread::sleep(PAUSE),
                }
            };
            let Ok((stream, _)) = self.listener.accept() else {
                // No descriptor is left.
                thread::sleep(PAUSE);
                continue;
            };
            let user = socket_peercred(&stream).map_or(u32::MAX, |peer| peer.uid.as_raw());
            let user = users.entry(user).or_insert_with(|| User::new(user));
            let Some(of_user) = user.processes.take() else {
                refusals.refuse(stream, refusal);
                continue;
            };
            let (place, files) = ((of_user, place), user.files.clone());
            // The close of a descriptor that a process has sent may never end, so this thread closes no stream.
            let (give, given) = channel();
            let keep = move || {
                if let Ok((stream, place)) = given.recv() {
                    keep(stream, device, &files, &place);
                }
            };
            match thread::Builder::new().spawn(keep) {
                // The thread waits for it.
                Ok(_) => drop(give.send((stream, place))),
                Err(_) => refusals.refuse(stream, refusal),
            }
        }
    }
}

static PROCESSES: AtomicUsize = AtomicUsize::new(0);
static FILES: AtomicUsize = AtomicUsize::new(0);

/// One of a limited number, until it is dropped.
#[derive(Debug)]
struct Counted<C: Deref<Target = AtomicUsize> = &'static AtomicUsize>(C);

impl<C: Deref<Target = AtomicUsize>> Counted<C> {
    fn take(count: C, most: usize) -> Option<Self> {
        let is_free = count.fetch_add(1, Ordering::Relaxed) < most;
        let counted = Self(count);
        is_free.then_some(counted)
    }
}

impl<C: Deref<Target = AtomicUsize>> Drop for Counted<C> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Place of a process or a file, among those of its user and among all.
type Place = (Counted<Arc<AtomicUsize>>, Counted);

/// Places of one kind that a user may have.
#[derive(Clone, Debug)]
struct Share {
    taken: Arc<AtomicUsize>,
    most: usize,
}

impl Share {
    /// Returns a user's share of all places of a kind. Root's share is the whole.
    fn new(user: u32, all: usize) -> Self {
        Self {
            taken: Arc::default(),
            most: match user {
                0 => all,
                _ => MOST_OF_USER,
            },
        }
    }

    fn take(&self) -> Option<Counted<Arc<AtomicUsize>>> {
        Counted::take(Arc::clone(&self.taken), self.most)
    }
}

/// Places of a user's processes and their files.
#[derive(Debug)]
struct User {
    processes: Share,
    files: Share,
}

impl User {
    fn new(user: u32) -> Self {
        Self {
            processes: Share::new(user, MOST_PROCESSES),
            files: Share::new(user, MOST_FILES),
        }
    }
}

/// Streams of processes without a place. The thread that accepts streams closes none of them, since a close may never end.
#[derive(Debug)]
struct Refusals {
    places: Share,
    /// Streams for which there was no thread yet.
    left: Vec<(UnixStream, Counted<Arc<AtomicUsize>>)>,
}

impl Refusals {
    fn new(most: usize) -> Self {
        let taken = Arc::default();
        Self {
            places: Share { taken, most },
            left: Vec::new(),
        }
    }

    /// Takes the place of a stream that may be refused.
    fn take(&mut self) -> Option<Counted<Arc<AtomicUsize>>> {
        self.close();
        self.places.take()
    }

    /// Ends the stream of a process without a place.
    fn refuse(&mut self, stream: UnixStream, place: Counted<Arc<AtomicUsize>>) {
        let _ = stream.shutdown(Shutdown::Both);
        self.left.push((stream, place));
        self.close();
    }

    /// Closes each stream on a thread of its own.
    fn close(&mut self) {
        while let Some(refused) = self.left.pop() {
            let (give, given) = channel();
            match thread::Builder::new().spawn(move || drop(given.recv())) {
                // The thread waits for it.
                Ok(_) => drop(give.send(refused)),
                Err(_) => return self.left.push(refused),
            }
        }
    }
}

/// Listens at a path for this process's user and group. Replaces the socket of an earlier keeper.
fn listen_at(path: &Path) -> io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&socket, &SocketAddrUnix::new(path)?) {
        Err(Errno::NOENT) => {}
        Err(Errno::CONNREFUSED) => fs::remove_file(path)?,
        // Its queue may be full.
        Ok(()) | Err(Errno::AGAIN) => return Err(io::ErrorKind::AddrInUse.into()),
        Err(error) => return Err(error.into()),
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o660))?;
    Ok(listener)
}

/// Session of a process.
#[derive(Debug)]
struct Session {
    window: File,
    offset: u64,
    generation: u32,
}

/// Serves a process until it has ended, and keeps its files until its session has.
fn keep(mut stream: UnixStream, device: u64, share: &Share, _place: &Place) {
    let mut files = BTreeMap::new();
    let _ = stream.set_read_timeout(Some(HELLO_LIMIT));
    let session = match receive(&stream) {
        Ok((Request::Session { offset, generation }, Some(window))) => Session {
            window: window.into(),
            offset,
            generation,
        },
        _ => return,
    };
    let bytes = || window_bytes(Path::new(CHARACTER_DEVICES), &session.window);
    let lies_there = may_write(&session.window) && bytes().is_some_and(|all| session.lies_in(all));
    if !lies_there || !session.is_there() {
        return;
    }
    let _ = stream.set_read_timeout(None);
    // The end of the process, or a message that makes no sense.
    while serve_one(&mut stream, device, share, &mut files).is_ok() {}
    // Descriptors in messages that were not received are closed with it.
    drop(stream);
    while !files.is_empty() && session.is_there() {
        thread::sleep(PAUSE);
    }
}

fn serve_one(
    stream: &mut UnixStream,
    device: u64,
    share: &Share,
    files: &mut BTreeMap<u64, (File, Place)>,
) -> io::Result<()> {
    match receive(stream)? {
        (Request::Hold { start, bytes }, file) => {
            let number = files.last_key_value().map_or(0, |(last, _)| last + 1);
            let too_many = || io::Error::from_raw_os_error(libc::EMFILE);
            // None arrives if no descriptor is left.
            let held = file.map(File::from).and_then(|file| {
                let of_user = share.take()?;
                Some((file, (of_user, Counted::take(&FILES, MOST_FILES)?)))
            });
            let parts = held
                .as_ref()
                .ok_or_else(too_many)
                .and_then(|(file, _)| parts(file, device, start, bytes));
            let status = parts.as_ref().err().map(|error| {
                let status = error.raw_os_error().unwrap_or(libc::EINVAL);
                u64::try_from(status).unwrap_or(u64::MAX)
            });
            let parts = parts.unwrap_or_default();
            let answer = Answer {
                status: status.unwrap_or(0),
                number,
                parts: parts.len() as u64,
            };
            let mut answer = answer.encode().to_vec();
            answer.extend(parts.iter().flat_map(|part| part.encode()));
            if let (None, Some(held)) = (status, held) {
                files.insert(number, held);
            }
            stream.write_all(&answer)
        }
        (Request::LetGo { number }, _) => {
            files.remove(&number);
            Ok(())
        }
        (Request::Session { .. }, _) => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Receives a message, and the descriptor that came with it. A message that was sent as a whole comes as a whole, so that the limit
/// on the time of one read is one on the time of a message.
fn receive(stream: &UnixStream) -> io::Result<(Request, Option<OwnedFd>)> {
    let mut bytes = [0; MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let descriptors = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let descriptor = descriptors.flatten().next();
    let is_whole = received.bytes == MESSAGE_BYTES;
    let request = is_whole.then(|| Request::decode(bytes)).flatten();
    Ok((request.ok_or(io::ErrorKind::InvalidData)?, descriptor))
}

/// Returns the parts of the memory in which a range of a file lies. The file is open for writing, on the file system with this
/// device number, and has all of the range.
fn parts(file: &File, device: u64, start: u64, bytes: u64) -> io::Result<Vec<Part>> {
    let status = file.metadata()?;
    if status.st_dev() != device || !may_write(file) || !status.is_file() {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let (mut parts, mut at) = (Vec::new(), start);
    let end = start.checked_add(bytes);
    let end = end.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
    while at < end {
        let extents = Extents::of(file, at, end - at)?;
        let before = at;
        for extent in extents.found() {
            at = extent.add_to(&mut parts, at, end)?;
        }
        if at == before {
            // It has a hole.
            return Err(io::Error::from_raw_os_error(libc::ENXIO));
        }
        if parts.len() > MOST_PARTS {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
    }
    Ok(parts)
}

/// One part of a file (`struct fiemap_extent` of linux/fiemap.h).
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved: [u64; 2],
    flags: u32,
    reserved_too: [u32; 3],
}

/// The last extent of the file (`FIEMAP_EXTENT_LAST`), or one of several that are reported as one (`FIEMAP_EXTENT_MERGED`). All
/// other states of an extent mean that its blocks are not the file's bytes.
const PLAIN: u32 = 0x1 | 0x1000;

impl Extent {
    /// Adds the part of `at..end` that lies in this extent. Returns its end.
    fn add_to(&self, parts: &mut Vec<Part>, at: u64, end: u64) -> io::Result<u64> {
        let stop = self.logical.saturating_add(self.length).min(end);
        let is_next = self.logical <= at && at < stop;
        let offset = self.physical.checked_add(at.saturating_sub(self.logical));
        let offset = offset.filter(|_| is_next && self.flags & !PLAIN == 0);
        let offset = offset.ok_or_else(|| io::Error::from_raw_os_error(libc::ENXIO))?;
        let bytes = stop - at;
        match parts.last_mut() {
            Some(last) if last.offset + last.bytes == offset => last.bytes += bytes,
            _ => parts.push(Part { offset, bytes }),
        }
        Ok(stop)
    }
}

/// Most extents of one answer of the kernel.
const ASKED: u32 = 64;

/// Parts of a file (`struct fiemap` of linux/fiemap.h, with room for extents).
#[repr(C)]
struct Extents {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [Extent; ASKED as usize],
}

impl Extents {
    /// Asks for the extents of a range.
    fn of(file: &File, start: u64, length: u64) -> io::Result<Self> {
        /// `FS_IOC_FIEMAP`.
        const FIEMAP: libc::c_ulong = 0xc020_660b;
        let mut asked = Self {
            start,
            length,
            flags: 0,
            mapped: 0,
            count: ASKED,
            reserved: 0,
            extents: [Extent::default(); ASKED as usize],
        };
        // SAFETY: the kernel reads the first fields and writes as many extents as `count` says.
        match unsafe { libc::ioctl(file.as_raw_fd(), FIEMAP, &raw mut asked) } {
            0 => Ok(asked),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn found(&self) -> impl Iterator<Item = &Extent> {
        self.extents.iter().take(self.mapped as usize)
    }
}

/// Returns whether a file was opened for reading and writing. To name it (`O_PATH`) takes no right to it.
fn may_write(file: &File) -> bool {
    fcntl_getfl(file).is_ok_and(|flags| flags.contains(OFlags::RDWR))
}

/// Returns the size of a device of the window. `None` for all other files: an access beyond the end of one would end this
/// process.
fn window_bytes(devices: &Path, window: &File) -> Option<u64> {
    let status = window.metadata().ok()?;
    let number = status.st_rdev();
    let name = format!("{}:{}", libc::major(number), libc::minor(number));
    let device = devices.join(name);
    let bus = fs::canonicalize(device.join("subsystem")).ok()?;
    if !status.file_type().is_char_device() || !bus.ends_with("bus/dax") {
        return None;
    }
    let bytes = fs::read_to_string(device.join("size")).ok()?;
    bytes.trim().parse().ok()
}

impl Session {
    /// Returns whether its first segment lies in a window of this size.
    fn lies_in(&self, bytes: u64) -> bool {
        let end = self.offset.checked_add(SEGMENT_BYTES as u64);
        self.offset.is_multiple_of(SEGMENT_BYTES as u64) && end.is_some_and(|end| end <= bytes)
    }

    /// Returns whether the backend still has the session. Its memory in the window is another session's, or zeros, afterwards.
    fn is_there(&self) -> bool {
        let word = generation_at(&self.window, self.offset);
        // A window that cannot be mapped is lost.
        self.generation != 0 && word.is_ok_and(|word| word == self.generation)
    }
}

/// Returns the word for the generation of the session at an offset of a device of the window.
fn generation_at(window: &File, offset: u64) -> io::Result<u32> {
    let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    let (read, shared) = (libc::PROT_READ, libc::MAP_SHARED);
    // SAFETY: the mapping is new, the word lies in it, and nothing refers to it when it is unmapped.
    unsafe {
        let start = libc::mmap(
            ptr::null_mut(),
            SEGMENT_BYTES,
            read,
            shared,
            window.as_raw_fd(),
            offset,
        );
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let word = start.cast::<u8>().add(GENERATION).cast::<u32>();
        let word = word.read_volatile();
        libc::munmap(start, SEGMENT_BYTES);
        Ok(word)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Read};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::os::unix::fs::OpenOptionsExt;

    use rustix::net::sockopt::set_socket_linger;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    const PAGE: u64 = 4096;

    fn extent(logical: u64, physical: u64, pages: u64, flags: u32) -> Extent {
        Extent {
            logical: logical * PAGE,
            physical: physical * PAGE,
            length: pages * PAGE,
            flags,
            ..Extent::default()
        }
    }

    #[test]
    fn extents_become_parts_of_the_range_alone() {
        let mut parts = Vec::new();
        let end = 9 * PAGE;
        let extents = [
            extent(0, 100, 4, 0),
            extent(4, 104, 2, 0),
            extent(6, 50, 10, PLAIN),
        ];
        let mut at = 2 * PAGE;
        for extent in &extents {
            at = extent.add_to(&mut parts, at, end).unwrap();
        }
        assert_eq!(at, end);
        let part = |offset, pages| Part {
            offset: offset * PAGE,
            bytes: pages * PAGE,
        };
        assert_eq!(parts, [part(102, 4), part(50, 3)]);
    }

    #[test]
    fn holes_and_blocks_that_are_not_the_files_bytes_are_refused() {
        const UNWRITTEN: u32 = 0x800;
        for wrong in [
            extent(3, 100, 2, 0),
            extent(0, 100, 4, UNWRITTEN),
            extent(0, 100, 2, 0),
            extent(0, u64::MAX / PAGE, 4, 0),
        ] {
            let added = wrong.add_to(&mut Vec::new(), 2 * PAGE, 4 * PAGE);
            assert!(added.is_err(), "{}", wrong.logical);
        }
    }

    #[test]
    fn a_session_is_there_until_its_memory_is_anothers() {
        let window = tempfile::tempfile().unwrap();
        window.set_len(2 * SEGMENT_BYTES as u64).unwrap();
        let place = SEGMENT_BYTES as u64 + GENERATION as u64;
        window.write_all_at(&7_u32.to_ne_bytes(), place).unwrap();
        let session = Session {
            window: window.try_clone().unwrap(),
            offset: SEGMENT_BYTES as u64,
            generation: 7,
        };
        assert!(
            session.lies_in(2 * SEGMENT_BYTES as u64)
                && !session.lies_in(2 * SEGMENT_BYTES as u64 - 1)
        );
        assert!(session.is_there());
        window.write_all_at(&[0; 4], place).unwrap();
        assert!(!session.is_there());
    }

    #[test]
    fn a_file_that_is_only_named_or_read_gives_no_place() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(may_write(file.as_file()));
        assert!(!may_write(&File::open(file.path()).unwrap()));
        let named = File::options()
            .read(true)
            .custom_flags(libc::O_PATH)
            .open(file.path());
        assert!(!may_write(&named.unwrap()));
    }

    #[test]
    fn a_file_that_is_no_device_of_the_window_is_none() {
        let devices = Path::new(CHARACTER_DEVICES);
        let null = File::open("/dev/null").unwrap();
        let file = tempfile::tempfile().unwrap();
        assert_eq!(window_bytes(devices, &null), None);
        assert_eq!(window_bytes(devices, &file), None);
        // The null device, as one of the window.
        let folder = tempfile::tempdir().unwrap();
        let (device, bus) = (folder.path().join("1:3"), folder.path().join("bus/dax"));
        fs::create_dir_all(&device).unwrap();
        fs::create_dir_all(&bus).unwrap();
        std::os::unix::fs::symlink(&bus, device.join("subsystem")).unwrap();
        fs::write(device.join("size"), "4096\n").unwrap();
        assert_eq!(window_bytes(folder.path(), &null), Some(4096));
        assert_eq!(window_bytes(folder.path(), &file), None);
    }

    #[test]
    fn a_message_comes_as_a_whole_or_ends_its_process() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let message = Request::LetGo { number: 7 }.encode();
        theirs.write_all(&message).unwrap();
        let (request, descriptor) = receive(&ours).unwrap();
        assert_eq!(request.encode(), message);
        assert!(descriptor.is_none());
        // A process that sends a byte now and then would keep its place.
        theirs.write_all(&message[..1]).unwrap();
        let error = receive(&ours).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_user_has_places_of_its_own() {
        let (user, other) = (User::new(1000), User::new(1001));
        let taken: Vec<_> = std::iter::repeat_with(|| user.processes.take())
            .map_while(|one| one)
            .collect();
        assert_eq!(taken.len(), MOST_OF_USER);
        assert!(other.processes.take().is_some());
        drop(taken);
        assert!(user.processes.take().is_some());
        let root = User::new(0);
        let taken = (0..MOST_PROCESSES).map_while(|_| root.processes.take());
        assert_eq!(taken.collect::<Vec<_>>().len(), MOST_PROCESSES);
    }

    /// Sends a message with a descriptor.
    fn send(over: &UnixStream, message: &[u8], descriptor: impl AsFd) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [descriptor.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let message = [IoSlice::new(message)];
        sendmsg(over, &message, &mut control, SendFlags::empty()).unwrap();
    }

    #[test]
    fn files_of_one_user_leave_places_to_those_of_others() {
        let file = tempfile::tempfile().unwrap();
        let device = file.metadata().unwrap().st_dev();
        let (user, other) = (User::new(1000), User::new(1001));
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let mut hold = |share: &Share, files: &mut BTreeMap<u64, (File, Place)>| {
            let request = Request::Hold { start: 0, bytes: 0 };
            send(&theirs, &request.encode(), &file);
            serve_one(&mut ours, device, share, files).unwrap();
            let mut answer = [0; MESSAGE_BYTES];
            theirs.read_exact(&mut answer).unwrap();
            Answer::decode(answer).status
        };
        // Two processes of one user.
        let (mut first, mut second) = (BTreeMap::new(), BTreeMap::new());
        for files in [&mut first, &mut second] {
            for _ in 0..MOST_OF_USER / 2 {
                assert_eq!(hold(&user.files, files), 0);
            }
        }
        let full = u64::try_from(libc::EMFILE).unwrap();
        assert_eq!(hold(&user.files, &mut second), full);
        assert_eq!(hold(&other.files, &mut BTreeMap::new()), 0);
        drop(first);
        assert_eq!(hold(&user.files, &mut second), 0);
        let root = User::new(0);
        let taken = (0..MOST_FILES).map_while(|_| root.files.take());
        assert_eq!(taken.collect::<Vec<_>>().len(), MOST_FILES);
    }

    #[test]
    fn a_refused_process_whose_close_takes_long_keeps_one_place_and_delays_no_other() {
        /// Time for which the close of a socket waits that a process sends.
        const LINGER: Duration = Duration::from_secs(20);
        let reader = TcpListener::bind("127.0.0.1:0").unwrap();
        let slow = TcpStream::connect(reader.local_addr().unwrap()).unwrap();
        set_socket_linger(&slow, Some(LINGER)).unwrap();
        slow.set_nonblocking(true).unwrap();
        // Bytes that nobody reads.
        while (&slow).write(&[0; 64 << 10]).is_ok() {}
        slow.set_nonblocking(false).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        send(&theirs, &[0], &slow);
        drop(slow);
        let began = Instant::now();
        let mut refusals = Refusals::new(2);
        let place = refusals.take().unwrap();
        refusals.refuse(ours, place);
        let take = |refusals: &mut Refusals| {
            loop {
                match refusals.take() {
                    Some(place) => break place,
                    None => thread::yield_now(),
                }
            }
        };
        for _ in 0..3 {
            let place = take(&mut refusals);
            let (ours, theirs) = UnixStream::pair().unwrap();
            refusals.refuse(ours, place);
            // The end.
            assert_eq!((&theirs).read(&mut [0]).unwrap(), 0);
        }
        let _last = take(&mut refusals);
        assert!(refusals.take().is_none(), "the first close has a place");
        assert!(began.elapsed() < LINGER / 2, "it waited for a close");
    }

    #[test]
    fn the_socket_is_for_a_group_and_replaces_one_that_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        let _listener = listen_at(&path).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o660);
        let taken = listen_at(&path).unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[test]
    fn so_many_are_counted_and_no_more() {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let held: Vec<_> = (0..3).map(|_| Counted::take(&COUNT, 2)).collect();
        assert_eq!(held.iter().flatten().count(), 2);
        drop(held);
        assert!(Counted::take(&COUNT, 1).is_some());
    }

    #[test]
    fn the_device_is_the_one_that_a_launcher_has_marked() {
        let (devices, nodes) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let node = |name: &str| nodes.path().join(name).display().to_string();
        let add = |name: &str, sectors: u64, first: &[u8]| {
            let folder = devices.path().join(name);
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("size"), format!("{sectors}\n")).unwrap();
            let file = File::create(node(name)).unwrap();
            file.set_len(4096).unwrap();
            file.write_all_at(first, 0).unwrap();
        };
        let find = || find(devices.path(), nodes.path());
        assert_eq!(find().marked, None);
        add("vda", 8, &MARK);
        add("pmem0", 8, b"another file system");
        add("pmem1", 0, &MARK);
        add("pmem3p1", 8, &MARK);
        fs::write(devices.path().join("pmem3p1/partition"), "1\n").unwrap();
        let found = find();
        assert_eq!((found.marked, found.foreign), (None, vec![node("pmem0")]));
        add("pmem2", 16, &MARK);
        fs::create_dir(devices.path().join("pmem4")).unwrap();
        let memory = Memory {
            node: node("pmem2"),
            bytes: 8192,
        };
        assert_eq!(find().marked, Some(memory));
        let none = super::find(Path::new("/nonexistent"), nodes.path());
        assert_eq!((none.marked, none.foreign), (None, Vec::new()));
    }

    #[test]
    fn a_folder_with_a_file_is_in_use() {
        let folder = tempfile::tempdir().unwrap();
        assert!(is_empty(folder.path()).unwrap());
        fs::write(folder.path().join(".hidden"), "").unwrap();
        assert!(!is_empty(folder.path()).unwrap());
        assert!(is_empty(&folder.path().join("missing")).is_err());
    }

    #[test]
    fn the_mark_stays_before_a_file_system() {
        let memory = tempfile::tempfile().unwrap();
        let bytes = 64 << 20;
        memory.set_len(bytes).unwrap();
        assert!(!is_marked(&memory).unwrap());
        memory.write_all_at(&MARK, 0).unwrap();
        ext4::format(&memory, bytes).unwrap();
        assert!(is_marked(&memory).unwrap());
    }

    #[test]
    fn files_of_other_file_systems_have_no_parts() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGE).unwrap();
        let device = file.metadata().unwrap().st_dev();
        assert!(parts(&file, device.wrapping_add(1), 0, PAGE).is_err());
        assert!(parts(&file, device, PAGE, u64::MAX).is_err());
    }
}

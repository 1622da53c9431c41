//! Sets up devices without KVM for the fuzz targets: there are no vCPUs, and interrupts are dropped.

mod passed_through;

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, LazyLock};

use event_manager::{EventManager, SubscriberId, SubscriberOps};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;
use wormhole_lock::Mutex;

use crate::bus::{BusDevice, Buses};
use crate::device_thread::DeviceThread;
use crate::devices::balloon::{Balloon, BalloonWorker};
use crate::devices::block::{Block, BlockWorker, DiskAccess, DiskImage};
use crate::devices::console::{Console, ConsoleWorker};
use crate::devices::fs::{Fs, FsWorker, Tag};
use crate::devices::net::{FrameStream, HostEnd, MacAddress, Net, NetWorker, Tap};
use crate::devices::pci::{BarSpace, CONFIG_PORTS, CONFIG_PORTS_LEN, Msix, PciBus};
use crate::devices::power::{ExitStatusPort, Pm1Ports};
use crate::devices::rng::{Rng, RngWorker};
use crate::devices::serial::{ConsoleTail, IrqTrigger, Tee};
use crate::devices::virtio::{
    ActiveQueue, BAR_SIZE, Interrupt, QueueServer, ServerHandle, VirtioDevice, VirtioPci,
    VirtioWorker,
};
use crate::devices::vsock::{
    Accepted, Attached, ConnectRequest, Mux, Opening, Refused, Vsock, VsockWorker,
};
use crate::irq::{IrqError, MsiController, MsiMessage};
use crate::memory::{PCI_HOLE_END, PCI_HOLE_START};
use crate::ram::{GuestRam, test_ram};
use crate::snapshot::{SnapshotError, VmState};
use crate::sync::Ending;

pub use self::passed_through::{PassedThrough, SPACE};

/// The guest's context id.
pub const GUEST_CID: u64 = 3;
/// Port to which connections are refused.
pub const REFUSED_PORT: u32 = 0;
/// Port whose connections are opened later.
const LATE_PORT: u32 = 3;
/// Offset of a virtio device's status register in its BAR.
const STATUS: u64 = 0x14;

fn eventfd() -> EventFd {
    EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).expect("an eventfd")
}

/// Interrupt controller that drops every interrupt.
#[derive(Debug)]
struct Nobody;

impl MsiController for Nobody {
    fn allocate_msi(&self) -> Result<(usize, EventFd), IrqError> {
        Ok((0, eventfd()))
    }

    fn route_msi(&self, _: usize, _: MsiMessage) -> Result<(), IrqError> {
        Ok(())
    }

    fn connect_msi(&self, _: usize, _: &EventFd) -> Result<(), IrqError> {
        Ok(())
    }

    fn disconnect_msi(&self, _: usize, _: &EventFd) -> Result<(), IrqError> {
        Ok(())
    }
}

impl Interrupt for Nobody {
    fn queue_used(&self, _: u16) {}
}

/// Returns a vsock device's mux and a receiver of the host ends of its connections.
fn mux() -> (Mux, Receiver<UnixStream>) {
    let (sender, streams) = channel();
    let accept = move |request: ConnectRequest| {
        if request.port == REFUSED_PORT {
            return Err(Refused);
        }
        let (guest, host) = UnixStream::pair().map_err(|_| Refused)?;
        host.set_nonblocking(true).map_err(|_| Refused)?;
        sender.send(host).map_err(|_| Refused)?;
        if request.port != LATE_PORT {
            return Ok(Accepted::Open(guest));
        }
        let (opening, opener) = Opening::new().map_err(|_| Refused)?;
        opener.open(guest);
        Ok(opening.into())
    };
    (Mux::new(GUEST_CID, Box::new(accept)), streams)
}

/// Returns a vsock device's worker and a receiver of the host ends of its connections.
fn vsock(ram: &GuestRam) -> (Box<dyn VirtioWorker>, Receiver<UnixStream>) {
    let (mux, streams) = mux();
    (Box::new(VsockWorker::new(ram.clone(), mux)), streams)
}

/// Creates a disk image of 64 KiB. Its reads take turns, since tmpfs has no reads without waiting.
fn disk() -> DiskImage {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let file = rustix::fs::memfd_create("disk", flags).expect("a memfd");
    rustix::fs::ftruncate(&file, 64 << 10).expect("room");
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    DiskImage::open(Path::new(&path), DiskAccess::ReadWrite).expect("a file")
}

/// A device's two halves, and the host's end of its socket if it has one.
struct Parts {
    device: Box<dyn VirtioDevice>,
    worker: Box<dyn VirtioWorker>,
    host: Option<UnixStream>,
}

impl Parts {
    fn block(ram: &GuestRam) -> Self {
        let image = disk();
        let device = Box::new(Block::new(&image));
        let (name, ending) = ("disk-0".to_owned(), Ending::default());
        let worker = Box::new(BlockWorker::new(ram.clone(), image, name, ending));
        Self {
            device,
            worker,
            host: None,
        }
    }

    fn rng(ram: &GuestRam) -> Self {
        Self {
            device: Box::new(Rng),
            worker: Box::new(RngWorker::new(ram.clone())),
            host: None,
        }
    }

    fn balloon(ram: &GuestRam) -> Self {
        Self {
            device: Box::new(Balloon { reporting: true }),
            worker: Box::new(BalloonWorker::new(ram.clone(), Arc::default())),
            host: None,
        }
    }

    /// An interface whose host's end is made of a socket.
    fn net<E: HostEnd + 'static>(ram: &GuestRam, end: impl FnOnce(OwnedFd) -> E) -> Self {
        let (ours, host) = sockets();
        let end = end(ours.into());
        Self {
            device: Box::new(Net::new(MacAddress::local(0), &end)),
            worker: Box::new(NetWorker::new(ram.clone(), Box::new(end))),
            host: Some(host),
        }
    }

    fn tap(ram: &GuestRam) -> Self {
        Self::net(ram, |socket| Tap::from_socket(socket).expect("a socket"))
    }

    fn stream(ram: &GuestRam) -> Self {
        Self::net(ram, |socket| {
            FrameStream::new(socket, |_| ()).expect("a socket")
        })
    }

    /// A file system. Reads and writes of its server's socket are packets.
    fn fs(ram: &GuestRam) -> Self {
        let kind = rustix::net::SocketType::SEQPACKET;
        let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
        let pair = rustix::net::socketpair(rustix::net::AddressFamily::UNIX, kind, flags, None);
        let (ours, server) = pair.expect("sockets");
        Self {
            device: Box::new(Fs::new(Tag::new("root").expect("a tag"))),
            worker: Box::new(FsWorker::new(ram.clone(), ours)),
            host: Some(server.into()),
        }
    }

    /// A console. Its output and its input are one socket.
    fn console(ram: &GuestRam) -> Self {
        let (ours, host) = sockets();
        ours.set_nonblocking(true).expect("a socket");
        let sink = ours.try_clone().expect("a descriptor");
        let output = Tee::new(Box::new(sink), ConsoleTail::default());
        let worker = ConsoleWorker::with_input(ram.clone(), output, ours.into());
        Self {
            device: Box::new(Console),
            worker: Box::new(worker.expect("a socket")),
            host: Some(host),
        }
    }
}

/// Returns two connected sockets; reads and writes of the second one do not block.
fn sockets() -> (UnixStream, UnixStream) {
    let (ours, host) = UnixStream::pair().expect("sockets");
    host.set_nonblocking(true).expect("a socket");
    (ours, host)
}

/// A device with active queues and what serves them, on the calling thread.
#[derive(Debug)]
pub struct Served {
    /// Receiver of the host ends of the guest's connections.
    pub streams: Receiver<UnixStream>,
    sizes: Vec<u16>,
    server: Server,
}

/// Server of a device's queues.
#[derive(Debug)]
enum Server {
    Monitor(Box<Loop>),
    /// Guest of another monitor.
    Attached(Box<Attached>),
}

/// The event loop that serves the queues of this monitor's guests.
#[derive(Debug)]
struct Loop {
    ram: GuestRam,
    manager: EventManager<QueueServer>,
    server: SubscriberId,
    kicks: Vec<Arc<EventFd>>,
}

impl Served {
    /// Bytes of RAM.
    pub const RAM: usize = 0x2_0000;

    /// Returns the addresses of a queue's descriptor table, available ring and used ring.
    pub fn rings(queue: usize) -> [u64; 3] {
        let base = 0x2000 * queue as u64;
        [base, base + 0x1000, base + 0x1800]
    }

    /// Starts a vsock device.
    pub fn vsock() -> Self {
        let ram = test_ram(Self::RAM);
        let (worker, streams) = vsock(&ram);
        Self::new(ram, &Vsock::new(GUEST_CID), worker, streams)
    }

    /// Starts a vsock device for a guest of another monitor.
    pub fn attached_vsock() -> Self {
        ignore_closed_sockets();
        let (mux, streams) = mux();
        Self {
            streams,
            sizes: vec![Attached::SIZE; 2],
            server: Server::Attached(Box::new(Attached::new(Self::RAM, mux, Self::rings))),
        }
    }

    /// Starts an entropy device.
    pub fn rng() -> Self {
        Self::of(Parts::rng)
    }

    /// Starts a disk.
    pub fn block() -> Self {
        Self::of(Parts::block)
    }

    /// Starts a network interface. Its tap is a socket, whose other end is in [`Self::streams`].
    pub fn net() -> Self {
        Self::of(Parts::tap)
    }

    /// Starts a network interface on the stream of a process, which is in [`Self::streams`].
    pub fn net_stream() -> Self {
        Self::of(Parts::stream)
    }

    /// Starts a file system. The socket of its server is in [`Self::streams`].
    pub fn fs() -> Self {
        Self::of(Parts::fs)
    }

    /// Starts a balloon.
    pub fn balloon() -> Self {
        Self::of(Parts::balloon)
    }

    /// Starts a console. The socket of its output and input is in [`Self::streams`].
    pub fn console() -> Self {
        Self::of(Parts::console)
    }

    fn of(parts: fn(&GuestRam) -> Parts) -> Self {
        let ram = test_ram(Self::RAM);
        let parts = parts(&ram);
        let (sender, streams) = channel();
        if let Some(host) = parts.host {
            sender.send(host).expect("the receiver is here");
        }
        Self::new(ram, &*parts.device, parts.worker, streams)
    }

    fn new(
        ram: GuestRam,
        device: &dyn VirtioDevice,
        worker: Box<dyn VirtioWorker>,
        streams: Receiver<UnixStream>,
    ) -> Self {
        ignore_closed_sockets();
        let sizes = device.queue_sizes().to_vec();
        let kicks: Vec<_> = sizes.iter().map(|_| Arc::new(eventfd())).collect();
        let mut manager = EventManager::new().expect("an event loop");
        let server = QueueServer::new(worker, kicks.clone());
        let server = manager.add_subscriber(server);
        let mut served = Loop {
            ram,
            manager,
            server,
            kicks,
        };
        served.start(&sizes, 0);
        Self {
            streams,
            sizes,
            server: Server::Monitor(Box::new(served)),
        }
    }

    /// Writes the guest's RAM. A write outside of it has no effect.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        let at = GuestAddress(at);
        _ = match &self.server {
            Server::Monitor(served) => served.ram.write_slice(bytes, at),
            Server::Attached(attached) => attached.memory.write_slice(bytes, at),
        };
    }

    /// Reads two bytes of the guest's RAM.
    pub fn read(&self, at: u64) -> u16 {
        let at = GuestAddress(at);
        let read = match &self.server {
            Server::Monitor(served) => served.ram.read_obj(at),
            Server::Attached(attached) => attached.memory.read_obj(at),
        };
        read.expect("an address in RAM")
    }

    /// Returns the number of queues.
    pub fn queues(&self) -> usize {
        self.sizes.len()
    }

    /// Returns the size of a queue in buffers.
    pub fn size(&self, queue: usize) -> u16 {
        self.sizes[queue]
    }

    /// Resets the device and starts it again with these feature bits, as its driver does.
    pub fn restart(&mut self, features: u64) {
        match &mut self.server {
            Server::Monitor(served) => served.restart(&self.sizes, features),
            Server::Attached(attached) => attached.restart(),
        }
    }

    /// Notifies a queue, as the driver does.
    pub fn notify(&mut self, queue: usize) {
        match &mut self.server {
            Server::Monitor(served) => served.kicks[queue].write(1).expect("room"),
            Server::Attached(attached) => attached.notify(queue),
        }
    }

    /// Handles each ready event once.
    pub fn turn(&mut self) {
        match &mut self.server {
            Server::Monitor(served) => {
                let turn = served.manager.run_with_timeout(0);
                turn.map(drop).expect("the event loop goes on");
            }
            Server::Attached(attached) => attached.turn(),
        }
    }
}

/// Makes writes to closed sockets fail, as Rust's runtime does in the monitor, and libFuzzer's own `main` does not.
fn ignore_closed_sockets() {
    // SAFETY: no handler is installed.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

impl Loop {
    fn start(&mut self, sizes: &[u16], features: u64) {
        let queues = sizes.iter().zip(&self.kicks).enumerate();
        let queues = queues.map(|(index, (size, kick))| {
            let [descriptors, available, used] = Served::rings(index).map(GuestAddress);
            let mut queue = Queue::new(*size).expect("a power of two");
            queue
                .try_set_desc_table_address(descriptors)
                .expect("aligned");
            queue
                .try_set_avail_ring_address(available)
                .expect("aligned");
            queue.try_set_used_ring_address(used).expect("aligned");
            queue.set_ready(true);
            ActiveQueue::new(queue, 0, Arc::new(Nobody), Arc::clone(kick))
        });
        let queues = queues.collect();
        let server = self.manager.subscriber_mut(self.server);
        server.expect("it is there").start(queues, features);
    }

    fn restart(&mut self, sizes: &[u16], features: u64) {
        let mut server = self
            .manager
            .remove_subscriber(self.server)
            .expect("it is there");
        server.stop();
        self.server = self.manager.add_subscriber(server);
        self.start(sizes, features);
    }
}

/// The PCI bus of a VM with a device of each kind. A device thread serves their queues, as in a VM.
#[derive(Debug)]
pub struct Machine {
    /// Port and memory buses, as a vCPU accesses them.
    pub buses: Buses,
    /// The guest's RAM.
    pub ram: GuestRam,
    pci: Arc<Mutex<PciBus>>,
    devices: Vec<Arc<Mutex<VirtioPci>>>,
    /// The hosts' ends of sockets, which no one reads.
    _hosts: Vec<UnixStream>,
}

impl Machine {
    /// Bytes of RAM.
    pub const RAM: usize = 0x1_0000;
    /// Number of devices; their device numbers begin at 1.
    pub const DEVICES: usize = 7;

    /// Creates a machine in the state in which its guest starts.
    pub fn new() -> Self {
        static THREAD: LazyLock<Mutex<DeviceThread>> =
            LazyLock::new(|| Mutex::new(DeviceThread::start("devices").expect("a thread")));
        let thread = THREAD.lock();
        let ram = test_ram(Self::RAM);
        let buses = Buses::default();
        let mut pci = PciBus::new(Arc::clone(&buses.memory));
        let mut bars = BarSpace::new(PCI_HOLE_START..PCI_HOLE_END);
        // The receiver of the streams is dropped, so that the mux refuses connections.
        let vsock = Parts {
            device: Box::new(Vsock::new(GUEST_CID)),
            worker: vsock(&ram).0,
            host: None,
        };
        let parts: [Parts; Self::DEVICES] = [
            vsock,
            Parts::rng(&ram),
            Parts::block(&ram),
            Parts::tap(&ram),
            Parts::fs(&ram),
            Parts::balloon(&ram),
            Parts::console(&ram),
        ];
        let mut hosts = Vec::new();
        let devices = parts.map(|parts| {
            let Parts {
                device,
                worker,
                host,
            } = parts;
            hosts.extend(host);
            let queues = device.queue_sizes().len();
            let server = ServerHandle::new(thread.handle(), worker, queues).expect("eventfds");
            let msix = Msix::new(Arc::new(Nobody), queues + 1).expect("eventfds");
            let address = bars.allocate(BAR_SIZE).expect("room");
            let function = VirtioPci::new(device, server, ram.clone(), msix, address);
            let function = Arc::new(Mutex::new(function));
            pci.add(Arc::clone(&function) as _).expect("room");
            function
        });
        let pci = Arc::new(Mutex::new(pci));
        let (start, len) = (CONFIG_PORTS.into(), CONFIG_PORTS_LEN.into());
        let ports = Arc::clone(&pci);
        buses.ports.insert(start, len, ports).expect("free");
        Self {
            buses,
            ram,
            pci,
            devices: devices.into(),
            _hosts: hosts,
        }
    }

    /// Gives the devices the state of a snapshot, and lets them serve their queues.
    ///
    /// # Errors
    /// The state does not fit.
    pub fn restore(&self, state: &VmState) -> Result<(), SnapshotError> {
        let console = Tee::new(Box::new(std::io::sink()), ConsoleTail::default());
        state.serial_port(IrqTrigger(eventfd()), console)?;
        let mut pci = self.pci.lock();
        let mut power = Pm1Ports::new(eventfd());
        state.restore_devices(&mut pci, &mut power, &mut ExitStatusPort::default())?;
        Ok(pci.resume()?)
    }
}

impl Default for Machine {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Machine {
    /// Resets the devices, which removes their queues from the thread.
    fn drop(&mut self) {
        for device in &self.devices {
            device.lock().write(STATUS, &[0]);
        }
    }
}

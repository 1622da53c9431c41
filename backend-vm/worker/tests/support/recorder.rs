//! A device that executes nothing and logs the order of its calls.
//!
//! Values and flags of calls are numbers that the test chose; they are logged in the order in which
//! the calls arrive. Each call first waits a random moment, as a real device's calls do. A test can
//! hold the calls of a name, as a busy device does.

mod arrays;
mod driver_calls;
mod green_contexts;
pub mod kernels;
pub mod sharing;
mod texture_references;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use wormhole_device::{
    Access, Chains, Copy3dEnd, CuError, Description, Device, DeviceOutput, Fill, Granularity,
    GraphDescription, GraphEdge, GraphNode, Graphs, ImageKind, ImageOutput, Jit, Launch,
    LaunchAttribute, LinkInput, LoadedFunction, LoadedModule, Loading, ManagedPlace, MemCopy3d,
    MemOps, MemoryOperation, Parameter, Peer, Peers, PoolProperties, Pools, RawChain, RawEvent,
    RawFunction, RawGraph, RawMemory, RawModule, RawPool, RawStream, Result, VirtualMemory,
};

use wormhole_backend_tests::backend::PATIENCE;
use wormhole_backend_tests::random::Random;

/// Time in which a call arrives that nothing holds up.
const MOMENT: Duration = Duration::from_millis(30);
/// Distance between the handles of two objects.
const STEP: u64 = 1 << 20;

#[derive(Debug)]
pub struct Recorder {
    description: Description,
    log: Mutex<Vec<u32>>,
    /// Streams, events and allocations that exist.
    live: Mutex<HashSet<u64>>,
    next: AtomicU64,
    random: Random,
    /// Registered host ranges: start → bytes.
    registered: Mutex<BTreeMap<u64, u64>>,
    gates: Mutex<Gates>,
    changed: Condvar,
    /// Bytes of parameters of every kernel.
    pub parameter_bytes: u32,
    /// Whether fences stay unwritten.
    pub withholds_fences: AtomicBool,
    /// Whether values of fences are logged.
    pub logs_fences: AtomicBool,
    /// Number of a launch that fails.
    pub fails: AtomicU32,
    /// Whether registering host memory fails.
    pub refuses_memory: AtomicBool,
    /// Whether unregistering host memory fails.
    pub keeps_memory: AtomicBool,
    /// Whether no memory is left for another allocation, image, executable graph or update of one.
    pub lacks_memory: AtomicBool,
    /// Whether images have managed variables.
    pub wants_place: AtomicBool,
    /// Whether all streams have work.
    pub is_busy: AtomicBool,
    /// Stream whose work has faulted. A query of the stream reports it.
    pub faulted: Mutex<Option<RawStream>>,
    /// Called with the flags of a new stream, and with 1000 more than the number of a queried
    /// limit: lets a test crash a worker in its executor or in a job thread.
    pub crash: Option<fn(u32)>,
    /// Edges of the graph that was instantiated last.
    pub edges: Mutex<Vec<GraphEdge>>,
    /// Functions and shared bytes of the kernels of each chain.
    chains: Mutex<HashMap<u64, Vec<(RawFunction, u32)>>>,
    /// Function that goes into no chain.
    pub unchained: Mutex<Option<RawFunction>>,
}

#[derive(Debug, Default)]
struct Gates {
    /// Names of the calls that are held.
    held: HashSet<&'static str>,
    /// Names of the calls that arrived, held or not, in order, and the threads that made them.
    arrived: Vec<(&'static str, ThreadId)>,
}

impl Recorder {
    pub fn new() -> Self {
        Self::at(0x6000_0000_0000)
    }

    /// Creates a recorder whose memory begins at `address`.
    pub fn at(address: u64) -> Self {
        Self {
            description: Description {
                name: "recorder".to_owned(),
                uuid: [0; 16],
                total_memory: 1 << 30,
                driver_version: 13000,
                attributes: Vec::new(),
                stream_priorities: (0, 0),
            },
            log: Mutex::new(Vec::new()),
            live: Mutex::new(HashSet::from([RawStream::LEGACY.0])),
            next: AtomicU64::new(address),
            random: Random::new(7),
            registered: Mutex::default(),
            gates: Mutex::default(),
            changed: Condvar::new(),
            parameter_bytes: 8,
            withholds_fences: AtomicBool::new(false),
            logs_fences: AtomicBool::new(false),
            fails: AtomicU32::new(u32::MAX),
            refuses_memory: AtomicBool::new(false),
            keeps_memory: AtomicBool::new(false),
            lacks_memory: AtomicBool::new(false),
            wants_place: AtomicBool::new(false),
            is_busy: AtomicBool::new(false),
            faulted: Mutex::default(),
            crash: None,
            edges: Mutex::default(),
            chains: Mutex::default(),
            unchained: Mutex::default(),
        }
    }

    /// Holds calls of this name from now on.
    pub fn hold(&self, call: &'static str) {
        self.gates.lock().unwrap().held.insert(call);
    }

    /// Releases calls of this name.
    pub fn let_go(&self, call: &'static str) {
        self.gates.lock().unwrap().held.remove(call);
        self.changed.notify_all();
    }

    /// Returns how often a call arrived.
    pub fn arrivals(&self, call: &str) -> usize {
        let gates = self.gates.lock().unwrap();
        gates
            .arrived
            .iter()
            .filter(|(name, _)| *name == call)
            .count()
    }

    /// Returns the calls of these names, in the order in which they arrived.
    pub fn order(&self, calls: &[&str]) -> Vec<&'static str> {
        let gates = self.gates.lock().unwrap();
        let names = gates.arrived.iter().map(|(name, _)| *name);
        names.filter(|name| calls.contains(name)).collect()
    }

    /// Returns the threads that made a call, in order.
    pub fn threads(&self, call: &str) -> Vec<ThreadId> {
        let gates = self.gates.lock().unwrap();
        let made = gates.arrived.iter().filter(|(name, _)| *name == call);
        made.map(|(_, thread)| *thread).collect()
    }

    /// Waits until a call has arrived `count` times.
    pub fn wait_for(&self, call: &str, count: usize) {
        let end = Instant::now() + PATIENCE;
        while self.arrivals(call) < count {
            assert!(Instant::now() < end, "{call} does not come");
            std::thread::yield_now();
        }
    }

    /// Returns whether a call arrives for the `count`th time within a moment. A call that must not come is seen if it
    /// comes; one that is late is not missed by more than the moment.
    pub fn comes_at_once(&self, call: &str, count: usize) -> bool {
        let end = Instant::now() + MOMENT;
        while self.arrivals(call) < count && Instant::now() < end {
            std::thread::yield_now();
        }
        self.arrivals(call) >= count
    }

    /// Logs the arrival of a call and waits while it is held. The wait is limited, so that a
    /// failing test ends, but outlasts the tests' own waits.
    pub(super) fn arrive(&self, call: &'static str) {
        let mut gates = self.gates.lock().unwrap();
        gates.arrived.push((call, std::thread::current().id()));
        let held = |gates: &mut Gates| gates.held.contains(call);
        drop(self.changed.wait_timeout_while(gates, 10 * PATIENCE, held));
    }

    /// Returns the registered host ranges: start and bytes.
    pub fn registered(&self) -> Vec<(u64, u64)> {
        let registered = self.registered.lock().unwrap();
        registered
            .iter()
            .map(|(&start, &bytes)| (start, bytes))
            .collect()
    }

    /// Returns the handle created last.
    pub fn last_made(&self) -> u64 {
        self.next.load(Ordering::Relaxed) - STEP
    }

    pub fn is_alive(&self, thing: u64) -> bool {
        self.live.lock().unwrap().contains(&thing)
    }

    /// Returns the number of streams, events and allocations that exist.
    pub fn alive(&self) -> usize {
        self.live.lock().unwrap().len()
    }

    /// Returns the numbers logged so far, in order of arrival.
    pub fn log(&self) -> Vec<u32> {
        self.log.lock().unwrap().clone()
    }

    pub(super) fn enter(&self, number: u32) {
        self.random.delay();
        self.log.lock().unwrap().push(number);
    }

    /// Has what is made from now on lie at an address.
    pub fn make_at(&self, address: u64) {
        self.next.store(address, Ordering::Relaxed);
    }

    pub(super) fn make(&self) -> u64 {
        let made = self.next.fetch_add(STEP, Ordering::Relaxed);
        self.live.lock().unwrap().insert(made);
        made
    }

    pub(super) fn check(&self, thing: u64) -> Result<()> {
        if self.live.lock().unwrap().contains(&thing) {
            Ok(())
        } else {
            Err(CuError::INVALID_HANDLE)
        }
    }

    pub(super) fn end(&self, thing: u64) -> Result<()> {
        if self.live.lock().unwrap().remove(&thing) {
            Ok(())
        } else {
            Err(CuError::INVALID_HANDLE)
        }
    }
}

impl Recorder {
    /// Checks that every object that the nodes name exists.
    fn check_nodes(&self, graph: &GraphDescription) -> Result<()> {
        for node in &graph.nodes {
            match node {
                GraphNode::Kernel(kernel) => self.check(kernel.function.0)?,
                GraphNode::Copy(copy) => {
                    for end in [copy.to, copy.from] {
                        if let Copy3dEnd::Array { array, .. } = end {
                            self.check(array.0)?;
                        }
                    }
                }
                GraphNode::RecordEvent(event) | GraphNode::WaitEvent(event) => {
                    self.check(event.0)?;
                }
                GraphNode::Fill(_)
                | GraphNode::Memory(_)
                | GraphNode::Empty
                | GraphNode::Conditional(_) => {}
            }
        }
        Ok(())
    }
}

impl Graphs for Recorder {
    fn instantiate(&self, graph: &GraphDescription, _: u64) -> Result<RawGraph> {
        self.arrive("instantiate");
        if self.lacks_memory.load(Ordering::Acquire) {
            return Err(CuError::OUT_OF_MEMORY);
        }
        self.check_nodes(graph)?;
        self.edges.lock().unwrap().clone_from(&graph.edges);
        let made = self.make();
        self.enter(u32::try_from(graph.nodes.len()).unwrap());
        Ok(RawGraph(made))
    }
    fn update_graph(&self, executable: RawGraph, graph: &GraphDescription) -> Result<()> {
        self.arrive("update_graph");
        if self.lacks_memory.load(Ordering::Acquire) {
            return Err(CuError::OUT_OF_MEMORY);
        }
        self.check(executable.0)?;
        self.check_nodes(graph)?;
        self.enter(u32::try_from(graph.nodes.len()).unwrap());
        Ok(())
    }
    fn launch_graph(&self, executable: RawGraph, stream: RawStream) -> Result<()> {
        self.arrive("launch_graph");
        self.check(executable.0)?;
        self.check(stream.0)
    }
    fn upload_graph(&self, executable: RawGraph, stream: RawStream) -> Result<()> {
        self.check(executable.0)?;
        self.check(stream.0)
    }
    fn destroy_graph(&self, executable: RawGraph) -> Result<()> {
        self.arrive("destroy_graph");
        self.end(executable.0)
    }
    fn enable_node(&self, executable: RawGraph, node: u32, _: bool) -> Result<()> {
        self.check(executable.0)?;
        self.enter(node);
        Ok(())
    }
}

impl Chains for Recorder {
    fn create_chain(&self, kernels: &[Launch<'_>]) -> Result<RawChain> {
        self.arrive("create_chain");
        if self.lacks_memory.load(Ordering::Acquire) {
            return Err(CuError::OUT_OF_MEMORY);
        }
        let executable = self.make();
        let kernels = kernels
            .iter()
            .map(|kernel| (kernel.function, kernel.shared));
        let mut chains = self.chains.lock().unwrap();
        chains.insert(executable, kernels.collect());
        Ok(RawChain {
            executable,
            template: 0,
            nodes: Box::default(),
        })
    }
    fn set_kernel(&self, chain: &RawChain, place: usize, kernel: &Launch<'_>) -> Result<()> {
        self.check(chain.executable)?;
        if *self.unchained.lock().unwrap() == Some(kernel.function) {
            return Err(CuError::INVALID_VALUE);
        }
        let mut chains = self.chains.lock().unwrap();
        let kernels = chains.get_mut(&chain.executable);
        let kernels = kernels.ok_or(CuError::INVALID_HANDLE)?;
        kernels[place] = (kernel.function, kernel.shared);
        Ok(())
    }
    fn launch_chain(&self, chain: &RawChain, stream: RawStream) -> Result<()> {
        self.arrive("launch_chain");
        self.check(chain.executable)?;
        self.check(stream.0)?;
        let kernels = self.chains.lock().unwrap()[&chain.executable].clone();
        for (function, number) in kernels {
            self.check(function.0)?;
            if self.fails.load(Ordering::Relaxed) == number {
                return Err(CuError::LAUNCH_FAILED);
            }
            self.enter(number);
        }
        Ok(())
    }
    fn destroy_chain(&self, chain: RawChain) -> Result<()> {
        self.arrive("destroy_chain");
        self.end(chain.executable)
    }
}

impl MemOps for Recorder {
    fn memory_operations(&self, stream: RawStream, operations: &[MemoryOperation]) -> Result<()> {
        self.arrive("memory_operations");
        self.check(stream.0)?;
        for operation in operations {
            self.enter(operation.flags);
        }
        Ok(())
    }
    fn set_stream_attribute(&self, stream: RawStream, attribute: &LaunchAttribute) -> Result<()> {
        self.check(stream.0)?;
        self.enter(attribute.id);
        Ok(())
    }
}

/// A recorder has no peers.
impl Peers for Recorder {
    fn holds(&self, address: u64) -> bool {
        self.live.lock().unwrap().contains(&address)
    }
    fn as_peer(&self) -> Peer {
        Peer {
            ordinal: 0,
            context: 0,
        }
    }
    fn peer_attribute(&self, _: Peer, _: u32) -> Result<i32> {
        self.arrive("peer_attribute");
        Err(CuError::INVALID_DEVICE)
    }
    fn enable_peer(&self, _: Peer) -> Result<()> {
        Err(CuError::INVALID_DEVICE)
    }
    fn disable_peer(&self, _: Peer) -> Result<()> {
        Err(CuError::INVALID_DEVICE)
    }
    fn copy_between(&self, _: &MemCopy3d, _: Peer, _: Peer, _: RawStream) -> Result<()> {
        Err(CuError::INVALID_DEVICE)
    }
    fn set_pool_access(&self, pool: RawPool, _: Peer, _: Access) -> Result<()> {
        self.check(pool.0)
    }
}

impl Device for Recorder {
    fn describe(&self) -> &Description {
        &self.description
    }
    fn health(&self, probe: &[RawStream]) -> Option<CuError> {
        let faulted = (*self.faulted.lock().unwrap())?;
        probe.contains(&faulted).then_some(CuError::ILLEGAL_ADDRESS)
    }
    fn take_output(&self) -> DeviceOutput {
        self.arrive("take_output");
        DeviceOutput::default()
    }
    unsafe fn register(&self, address: u64, bytes: u64) -> Result<()> {
        self.arrive("register");
        if self.refuses_memory.load(Ordering::Relaxed) {
            return Err(CuError::OUT_OF_MEMORY);
        }
        self.registered.lock().unwrap().insert(address, bytes);
        Ok(())
    }
    fn unregister(&self, address: u64) -> Result<()> {
        self.arrive("unregister");
        if self.keeps_memory.load(Ordering::Relaxed) {
            return Err(CuError::ILLEGAL_ADDRESS);
        }
        let known = self.registered.lock().unwrap().remove(&address);
        known.map(drop).ok_or(CuError::HOST_MEMORY_NOT_REGISTERED)
    }
    fn write(&self, _: u64, _: &[u8], stream: RawStream) -> Result<()> {
        self.arrive("write");
        self.check(stream.0)
    }
    fn fill(&self, fill: Fill, stream: RawStream) -> Result<()> {
        self.arrive("fill");
        self.check(stream.0)?;
        self.check(fill.destination)?;
        self.enter(fill.value);
        Ok(())
    }
    fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        self.arrive("destroy_stream");
        self.end(stream.0)
    }
    fn query_stream(&self, stream: RawStream) -> Result<bool> {
        self.arrive("query_stream");
        self.check(stream.0)
            .map(|()| !self.is_busy.load(Ordering::Acquire))
    }
    fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        self.check(stream.0)
    }
    fn synchronize(&self) -> Result<()> {
        self.arrive("synchronize");
        Ok(())
    }
    fn wait_event(&self, stream: RawStream, event: RawEvent, flags: u32) -> Result<()> {
        self.arrive("wait_event");
        self.check(stream.0)?;
        self.check(event.0)?;
        self.enter(flags);
        Ok(())
    }
    fn write_fence(&self, stream: RawStream, address: u64, value: u64) -> Result<()> {
        self.arrive("write_fence");
        self.check(stream.0)?;
        if self.logs_fences.load(Ordering::Relaxed) {
            self.enter(u32::try_from(value).unwrap());
        }
        if self.withholds_fences.load(Ordering::Relaxed) {
            return Ok(());
        }
        let address = usize::try_from(address).unwrap();
        let word = std::ptr::with_exposed_provenance::<AtomicU64>(address);
        // SAFETY: an aligned word of the session, which the test keeps mapped.
        unsafe { &*word }.store(value, Ordering::Release);
        Ok(())
    }
    fn create_event(&self, _: u32) -> Result<RawEvent> {
        Ok(RawEvent(self.make()))
    }
    fn destroy_event(&self, event: RawEvent) -> Result<()> {
        self.arrive("destroy_event");
        self.end(event.0)
    }
    fn record_event(&self, event: RawEvent, stream: RawStream, flags: u32) -> Result<()> {
        self.arrive("record_event");
        self.check(stream.0)?;
        self.check(event.0)?;
        self.enter(flags);
        Ok(())
    }
    fn query_event(&self, event: RawEvent) -> Result<bool> {
        self.arrive("query_event");
        self.check(event.0).map(|()| true)
    }
    fn synchronize_event(&self, event: RawEvent) -> Result<()> {
        self.check(event.0)
    }
    fn try_link(&self, _: &[LinkInput<'_>], _: &mut Jit) -> Result<()> {
        self.arrive("link");
        Ok(())
    }
    fn link(&self, _: &[LinkInput<'_>], _: &mut Jit) -> Result<Vec<u8>> {
        self.arrive("link");
        Ok(Vec::new())
    }
    fn load(
        &self,
        _: &[u8],
        _: ImageKind,
        _: &mut Jit,
        place: Option<ManagedPlace>,
    ) -> Result<Loading> {
        self.arrive("load");
        if place.is_none() && self.wants_place.load(Ordering::Acquire) {
            return Ok(Loading::NeedsPlace(64));
        }
        if self.lacks_memory.load(Ordering::Acquire) {
            return Err(CuError::OUT_OF_MEMORY);
        }
        Ok(Loading::Done(LoadedModule {
            module: RawModule(self.make()),
            output: ImageOutput::None,
            initial: Vec::new(),
        }))
    }
    fn unload(&self, module: RawModule) -> Result<()> {
        self.arrive("unload");
        self.end(module.0)
    }
    fn function(&self, module: RawModule, _: &str) -> Result<LoadedFunction> {
        self.arrive("function");
        self.check(module.0)?;
        Ok(LoadedFunction {
            // Exists as long as its module.
            function: RawFunction(module.0),
            parameters: vec![Parameter {
                offset: 0,
                size: self.parameter_bytes,
            }],
            attributes: Vec::new(),
            prints: false,
        })
    }
    fn global(&self, module: RawModule, _: &str) -> Result<(u64, u64)> {
        self.arrive("global");
        self.check(module.0)?;
        Ok((self.make(), 64))
    }
    fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        self.arrive("launch");
        self.check(launch.stream.0)?;
        self.check(launch.function.0)?;
        if self.fails.load(Ordering::Relaxed) == launch.shared {
            return Err(CuError::LAUNCH_FAILED);
        }
        let events = launch.events;
        if let Some(event) = events.programmatic {
            self.check(event.0)?;
            self.arrive(match events.at_block_start {
                true => "an event at the start of blocks",
                false => "a programmatic event",
            });
        }
        if let Some(event) = events.begun {
            self.check(event.0)?;
            self.arrive("an event of blocks that have begun");
        }
        self.enter(launch.shared);
        Ok(())
    }
    fn set_limit(&self, _: u32, _: u64) -> Result<()> {
        self.arrive("set_limit");
        Ok(())
    }
    fn reset(&self) -> Result<()> {
        self.arrive("reset");
        self.registered.lock().unwrap().clear();
        let mut live = self.live.lock().unwrap();
        live.clear();
        live.insert(RawStream::LEGACY.0);
        Ok(())
    }
}

impl Pools for Recorder {
    fn create_pool(&self, _: &PoolProperties) -> Result<RawPool> {
        self.arrive("create_pool");
        Ok(RawPool(self.make()))
    }
    fn pool_attribute(&self, _: RawPool, _: u32) -> Result<u64> {
        self.arrive("pool_attribute");
        Ok(0)
    }
    fn set_pool_attribute(&self, _: RawPool, _: u32, _: u64) -> Result<()> {
        self.arrive("set_pool_attribute");
        Ok(())
    }
}

impl VirtualMemory for Recorder {
    fn granularity(&self) -> Result<Granularity> {
        self.arrive("granularity");
        Ok(Granularity {
            minimum: STEP,
            recommended: STEP,
        })
    }
    fn place(&self, _: u64, _: u64) -> Result<()> {
        self.arrive("place");
        Ok(())
    }
    fn displace(&self, _: u64, _: u64) -> Result<()> {
        self.arrive("displace");
        Ok(())
    }
    fn create_memory(&self, _: u64, _: u32) -> Result<RawMemory> {
        self.arrive("create_memory");
        Ok(RawMemory(self.make()))
    }
    fn map(&self, _: u64, _: u64, memory: RawMemory) -> Result<()> {
        self.arrive("map");
        self.check(memory.0)
    }
    fn set_access(&self, _: u64, _: u64, _: Access) -> Result<()> {
        self.arrive("set_access");
        Ok(())
    }
}

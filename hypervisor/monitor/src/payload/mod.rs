//! Runs payloads: freestanding programs in user mode of a VM, without a kernel.
//!
//! A payload is a static ELF file linked at fixed addresses from 2 MiB up. It starts at its entry
//! point in long mode at privilege level 3, with ports allowed, SSE2 (no AVX), and
//!
//! - RDI = address of this vCPU's parameter block: [`PARAMETERS`] words shared with the host,
//! - RSI = number of the vCPU,
//! - RSP = top of a stack of about 120 KiB, aligned as after a call.
//!
//! A payload ends with `out` of EAX to [`crate::EXIT_STATUS_PORT`]. The window is mapped write-back at an
//! address that the caller chooses, so that it can be the same as in the host process.
//!
//! ```text
//! 0       .. 2 MiB        page tables and exception handlers, not visible to the payload
//! 2 MiB   .. memory-2 MiB the program, one to one; 2 MiB pages with the segments' permissions
//! memory-2 MiB .. memory  parameter blocks and stacks, 128 KiB per vCPU
//! ```

mod doorbell;
pub(crate) mod elf;
mod exceptions;
mod paging;

pub use self::doorbell::Doorbell;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use kvm_bindings::kvm_regs;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};
use wormhole_lock::Mutex;

use crate::bus::{BusDevice, BusError, Buses, Effect};
use crate::confinement::Confinement;
use crate::cpu::{self, CpuError};
use crate::devices::power;
use crate::disabled_exits::DisabledExits;
use crate::exit_reason::ExitReason;
use crate::memory::{self, Range, WINDOW_ALIGN, WINDOW_UNIT, Window};
use crate::ram::GuestRam;
use crate::snapshot::AfterSnapshot;
use crate::stats::{Stats, VmStats};
use crate::vcpu::{End, Event, ExitCounters, ExitCounts, StopHandle, VcpuThreads};
use crate::vm::{VmError, check_pins, kvm_error};

/// Words in a parameter block.
pub const PARAMETERS: usize = 512;
/// Maximum number of vCPUs of a payload's VM.
pub const MAX_PAYLOAD_VCPUS: usize = 16;

const PROGRAM_START: u64 = paging::PAGE;
/// Start of the page tables, which end at the exception handlers. They suffice for a window of 200 GiB.
const TABLES_START: u64 = 0x1000;
const TABLES_END: u64 = 0x10_0000;
/// Bytes of one vCPU's parameter block and stack.
const VCPU_AREA: u64 = paging::PAGE / MAX_PAYLOAD_VCPUS as u64;
/// Interrupts disabled; I/O privilege level 3 allows user mode to access ports.
const RFLAGS: u64 = 2 | 3 << 12;
const USER_ADDRESS_END: u64 = 1 << 47;

/// Error from loading a payload.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {
    /// The file is not a static program.
    #[error("the payload is no static program: {what}")]
    NotAProgram {
        /// Description of the defect.
        what: &'static str,
    },
    /// A segment lies outside the payload's private memory.
    #[error(
        "the payload has a segment of {bytes} bytes at {address:#x}; segments must lie between \
         {low:#x} and {high:#x}"
    )]
    Segment {
        /// Address of the segment.
        address: u64,
        /// Size in bytes.
        bytes: u64,
        /// First allowed address.
        low: u64,
        /// End of the allowed addresses.
        high: u64,
    },
    /// The size of private memory is out of range.
    #[error("a payload cannot have {mib} MiB of memory: an even number between 8 and 1024 MiB")]
    MemorySize {
        /// Requested size in MiB.
        mib: u64,
    },
    /// The number of vCPUs is out of range.
    #[error("a payload cannot have {count} vCPUs: between 1 and {MAX_PAYLOAD_VCPUS} are possible")]
    Vcpus {
        /// Number of parameter blocks, one per vCPU.
        count: usize,
    },
    /// A parameter block is too long.
    #[error("vCPU {vcpu} has {words} parameters, more than {PARAMETERS} are not possible")]
    Parameters {
        /// Number of the vCPU.
        vcpu: usize,
        /// Number of parameters.
        words: usize,
    },
    /// The window cannot be mapped at the requested address.
    #[error(
        "the window of {bytes} bytes cannot be at {address:#x}: it needs a multiple of 2 MiB above \
         the payload's memory and below {USER_ADDRESS_END:#x}"
    )]
    WindowAddress {
        /// Requested address.
        address: u64,
        /// Size in bytes.
        bytes: u64,
    },
    /// The window is too large for the page tables.
    #[error("a window of {bytes} bytes is too large for a payload")]
    WindowTooLarge {
        /// Size in bytes.
        bytes: u64,
    },
    /// Guest memory could not be written.
    #[error("cannot write the payload to guest memory")]
    Write(#[from] GuestMemoryError),
}

/// A window and its address in the payload.
#[derive(Debug)]
pub struct PayloadWindow {
    /// The memfd, sealed against resizing, a multiple of 2 MiB.
    pub memfd: OwnedFd,
    /// Address in the payload, a multiple of 2 MiB.
    pub address: u64,
}

/// Configuration of a payload's VM.
#[derive(Debug)]
pub struct PayloadConfig {
    /// The ELF file.
    pub elf: Vec<u8>,
    /// One parameter block per vCPU; missing words are 0.
    pub parameters: Vec<Vec<u64>>,
    /// Private memory in MiB, at least 8.
    pub memory_mib: u64,
    /// The window.
    pub window: Option<PayloadWindow>,
    /// Watchdog timeout, after which the VM is stopped.
    pub timeout: Option<Duration>,
    /// VM exits to disable.
    pub disabled_exits: DisabledExits,
    /// The host processor on which each vCPU stays; none if the host's scheduler chooses.
    pub pins: Vec<usize>,
    /// The doorbell and the wait for its answer; none for a payload that only polls.
    pub doorbell: Option<Doorbell>,
}

/// Result of a payload's run.
#[derive(Debug, Clone)]
pub struct PayloadReport {
    /// If all vCPUs ended by themselves, [`ExitReason::Exited`] with the first status that is not 0, or
    /// with 0; otherwise the reason for which the VM ended.
    pub outcome: ExitReason,
    /// Exit statuses of the vCPUs that ended by themselves.
    pub statuses: BTreeMap<u8, u32>,
    /// Time from the start of the vCPUs to the end.
    pub duration: Duration,
    /// Exits to the monitor.
    pub exits: ExitCounts,
}

/// The parameter block of one vCPU, shared with the payload; usable from any thread.
#[derive(Debug, Clone)]
pub struct ParameterBlock {
    ram: GuestRam,
    address: u64,
}

impl ParameterBlock {
    /// Loads a word with Acquire ordering; `None` past the end.
    pub fn load(&self, index: usize) -> Option<u64> {
        let at = self.word(index)?;
        self.ram.load(at, Ordering::Acquire).ok()
    }

    /// Stores a word with Release ordering; `false` past the end.
    pub fn store(&self, index: usize, value: u64) -> bool {
        self.word(index)
            .is_some_and(|at| self.ram.store(value, at, Ordering::Release).is_ok())
    }

    fn word(&self, index: usize) -> Option<GuestAddress> {
        (index < PARAMETERS).then(|| GuestAddress(self.address + 8 * index as u64))
    }
}

/// A payload's VM, ready to run.
#[derive(Debug)]
pub struct PayloadVm {
    vcpus: Vec<VcpuFd>,
    pins: Vec<usize>,
    blocks: Vec<ParameterBlock>,
    stats: VmStats,
    counters: Arc<ExitCounters>,
    events: (Sender<Event>, Receiver<Event>),
    timeout: Option<Duration>,
    ram: GuestRam,
    buses: Buses,
    // Dropped after the vCPUs, which use them.
    _vm: VmFd,
    window: Option<Window>,
}

impl PayloadVm {
    /// Creates the VM and loads the payload.
    pub fn new(config: PayloadConfig) -> Result<Self, VmError> {
        check(&config)?;
        check_pins(&config.pins, config.parameters.len())?;
        let kvm = Kvm::new().map_err(kvm_error("/dev/kvm"))?;
        let vm = kvm.create_vm().map_err(kvm_error("a VM"))?;
        config.disabled_exits.apply(&vm)?;
        let buses = buses()?;
        if let Some(doorbell) = config.doorbell {
            doorbell.connect(&vm, &buses)?;
        }
        let memory = Range {
            start: 0,
            len: config.memory_mib << 20,
        };
        let ram = memory::map_ram(&[memory])?;
        memory::add_ram_memslots(&vm, &ram)?;
        let address = config.window.as_ref().map_or(0, |window| window.address);
        let window = config
            .window
            .map(|window| Window::new(window.memfd))
            .transpose()?;
        let physical = memory.end().max(memory::HIGH_RAM_START);
        let physical = physical.next_multiple_of(WINDOW_ALIGN);
        if let Some(window) = &window {
            window.add_memslot(&vm, physical)?;
        }

        let areas = memory.end() - paging::PAGE;
        let program = elf::parse(&config.elf, PROGRAM_START, areas)?;
        let mut tables = paging::PageTables::new(&ram, TABLES_START, TABLES_END);
        map_private(&mut tables, &program, areas)?;
        if let Some(window) = &window {
            map_window(&mut tables, address, physical, window.len())?;
        }
        for segment in &program.segments {
            ram.write_slice(segment.bytes, GuestAddress(segment.address))
                .map_err(PayloadError::Write)?;
        }

        let mut vcpus = Vec::new();
        let mut blocks = Vec::new();
        let supported = cpu::supported_cpuid(&kvm)?;
        for (id, parameters) in (0u8..).zip(&config.parameters) {
            let block = ParameterBlock {
                ram: ram.clone(),
                address: areas + u64::from(id) * VCPU_AREA,
            };
            for (index, word) in parameters.iter().enumerate() {
                block.store(index, *word);
            }
            let vcpu = vm.create_vcpu(u64::from(id)).map_err(kvm_error("a vCPU"))?;
            vcpu.set_cpuid2(&cpu::cpuid_of(&supported, id))
                .map_err(kvm_error("the vCPU's CPUID"))?;
            let exceptions = exceptions::write(&ram, id).map_err(PayloadError::Write)?;
            enter(
                &vcpu,
                id,
                tables.root(),
                &exceptions,
                program.entry,
                block.address,
            )?;
            vcpus.push(vcpu);
            blocks.push(block);
        }
        let stats = VmStats::new(
            Stats::of_vm(&vm)?,
            vcpus.iter().map(Stats::of_vcpu).collect::<Result<_, _>>()?,
        );
        Ok(Self {
            vcpus,
            pins: config.pins,
            blocks,
            stats,
            counters: Arc::new(ExitCounters::default()),
            events: channel(),
            timeout: config.timeout,
            ram,
            buses,
            _vm: vm,
            window,
        })
    }

    /// Returns the parameter block of a vCPU.
    pub fn parameters(&self, vcpu: usize) -> Option<ParameterBlock> {
        self.blocks.get(vcpu).cloned()
    }

    /// Returns a handle that stops the VM from another thread.
    pub fn stop_handle(&self) -> StopHandle {
        StopHandle::new(self.events.0.clone())
    }

    /// Returns the window. Parts of it can be replaced while the payload runs.
    pub fn window(&self) -> Option<Window> {
        self.window.clone()
    }

    /// Returns KVM's statistics, readable from any thread while the VM runs and after.
    pub fn stats(&self) -> VmStats {
        self.stats.clone()
    }

    /// Returns the counters of exits to the monitor, readable from any thread.
    pub fn exit_counters(&self) -> Arc<ExitCounters> {
        Arc::clone(&self.counters)
    }

    /// Runs until the payload has ended on every vCPU, or one vCPU fails.
    pub fn run(mut self) -> Result<PayloadReport, VmError> {
        let buses = std::mem::take(&mut self.buses);
        self.run_on(buses)
    }

    /// Runs as [`Self::run`] does, with the devices of `buses`.
    pub(crate) fn run_on(self, buses: Buses) -> Result<PayloadReport, VmError> {
        let count = self.vcpus.len();
        let buses = Arc::new(buses);
        let (sender, receiver) = &self.events;
        let mut statuses = BTreeMap::new();
        let start = Instant::now();
        let confinement = Confinement::of_vcpu()?;
        let threads = VcpuThreads::start(
            self.vcpus,
            &self.pins,
            &buses,
            &self.counters,
            sender,
            confinement,
        )?;
        // No handle requests snapshots of a payload.
        let save = |_| AfterSnapshot::Continue;
        let outcome = threads.wait(receiver, self.timeout, save, |end| match end.end {
            End::Write(Effect::Exited(status)) => {
                statuses.insert(end.vcpu, status);
                (statuses.len() == count).then(|| ExitReason::Exited {
                    status: statuses.values().copied().find(|s| *s != 0).unwrap_or(0),
                })
            }
            End::Write(Effect::Exception) => {
                Some(exceptions::outcome(&self.ram, end.vcpu, end.registers))
            }
            _ => end.failure(),
        });
        drop(threads);
        Ok(PayloadReport {
            outcome,
            statuses,
            duration: start.elapsed(),
            exits: self.counters.read(),
        })
    }
}

/// Validates the configuration before anything is created.
fn check(config: &PayloadConfig) -> Result<(), PayloadError> {
    let mib = config.memory_mib;
    if !(8..=1024).contains(&mib) || !mib.is_multiple_of(2) {
        return Err(PayloadError::MemorySize { mib });
    }
    let count = config.parameters.len();
    if !(1..=MAX_PAYLOAD_VCPUS).contains(&count) {
        return Err(PayloadError::Vcpus { count });
    }
    match config
        .parameters
        .iter()
        .position(|words| words.len() > PARAMETERS)
    {
        Some(vcpu) => Err(PayloadError::Parameters {
            vcpu,
            words: config.parameters[vcpu].len(),
        }),
        None => Ok(()),
    }
}

/// Identity-maps the handlers, the program, the parameter blocks and the stacks.
fn map_private(
    tables: &mut paging::PageTables<'_>,
    program: &elf::Program<'_>,
    areas: u64,
) -> Result<(), PayloadError> {
    let too_large = |_| PayloadError::WindowTooLarge { bytes: areas };
    let supervisor = paging::Access {
        user: false,
        writable: true,
        executable: true,
    };
    tables.map(0, 0, supervisor).map_err(too_large)?;
    let pages = PROGRAM_START / paging::PAGE..areas / paging::PAGE;
    for page in pages.map(|page| page * paging::PAGE) {
        // A page shared by several segments gets the union of their permissions; a page without a
        // segment is not mapped.
        let on_page = program.segments.iter().filter(|segment| {
            segment.address < page + paging::PAGE && segment.address + segment.memory_size > page
        });
        let access = on_page.fold(paging::Access::default(), |access, segment| {
            paging::Access {
                user: true,
                writable: access.writable || segment.writable,
                executable: access.executable || segment.executable,
            }
        });
        if access.user {
            tables.map(page, page, access).map_err(too_large)?;
        }
    }
    let data = paging::Access {
        user: true,
        writable: true,
        executable: false,
    };
    tables.map(areas, areas, data).map_err(too_large)
}

fn map_window(
    tables: &mut paging::PageTables<'_>,
    address: u64,
    physical: u64,
    bytes: u64,
) -> Result<(), PayloadError> {
    let end = address.checked_add(bytes);
    let fits = end.is_some_and(|end| end <= USER_ADDRESS_END);
    // Private memory ends at 1 GiB at the latest.
    if !address.is_multiple_of(WINDOW_UNIT) || address < 1 << 30 || !fits {
        return Err(PayloadError::WindowAddress { address, bytes });
    }
    let data = paging::Access {
        user: true,
        writable: true,
        executable: false,
    };
    for offset in (0..bytes / paging::PAGE).map(|page| page * paging::PAGE) {
        tables
            .map(address + offset, physical + offset, data)
            .map_err(|_| PayloadError::WindowTooLarge { bytes })?;
    }
    Ok(())
}

/// Sets a vCPU's registers to the payload's entry point, in user mode.
fn enter(
    vcpu: &VcpuFd,
    id: u8,
    page_tables: u64,
    tables: &exceptions::Tables,
    entry: u64,
    block: u64,
) -> Result<(), CpuError> {
    let set = |what| {
        move |source| CpuError::Set {
            what,
            vcpu: id,
            source,
        }
    };
    let mut sregs = vcpu.get_sregs().map_err(set("system registers"))?;
    cpu::long_mode(&mut sregs, page_tables);
    sregs.cr0 |= cpu::CR0_WP;
    sregs.cr4 |= cpu::CR4_OSFXSR | cpu::CR4_OSXMMEXCPT;
    sregs.efer |= cpu::EFER_NX;
    sregs.cs = cpu::flat_segment(exceptions::USER_CODE, 0xb, 3, true);
    let data = cpu::flat_segment(exceptions::USER_DATA, 0x3, 3, false);
    for segment in [
        &mut sregs.ds,
        &mut sregs.es,
        &mut sregs.fs,
        &mut sregs.gs,
        &mut sregs.ss,
    ] {
        *segment = data;
    }
    sregs.tr = cpu::task_segment();
    sregs.tr.base = tables.task_state;
    (sregs.gdt.base, sregs.gdt.limit) = tables.gdt;
    (sregs.idt.base, sregs.idt.limit) = tables.idt;
    vcpu.set_sregs(&sregs).map_err(set("system registers"))?;
    vcpu.set_regs(&kvm_regs {
        rip: entry,
        // As after a call: the slot of the return address.
        rsp: block + VCPU_AREA - 8,
        rdi: block,
        rsi: u64::from(id),
        rflags: RFLAGS,
        ..Default::default()
    })
    .map_err(set("registers"))
}

/// The port [`power::EXIT_STATUS`]: a write ends the payload on its vCPU.
#[derive(Debug)]
struct ExitPort;

impl BusDevice for ExitPort {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&mut self, _: u64, data: &[u8]) -> Effect {
        Effect::Exited(power::status(data))
    }
}

/// The port [`exceptions::PORT`]: the exception handlers write to it.
#[derive(Debug)]
struct ExceptionPort;

impl BusDevice for ExceptionPort {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&mut self, _: u64, _: &[u8]) -> Effect {
        Effect::Exception
    }
}

/// Creates a payload's buses with its two ports, the only devices.
fn buses() -> Result<Buses, BusError> {
    let buses = Buses::default();
    let exit = Arc::new(Mutex::new(ExitPort));
    buses.ports.insert(power::EXIT_STATUS.into(), 1, exit)?;
    let exception = Arc::new(Mutex::new(ExceptionPort));
    buses.ports.insert(exceptions::PORT.into(), 1, exception)?;
    Ok(buses)
}

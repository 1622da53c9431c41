//! Payloads: freestanding programs that a VM runs in user mode, without a kernel.
//!
//! A payload is a static ELF file linked at fixed addresses from 2 MiB up. It starts at its entry
//! point in long mode at privilege level 3, with ports allowed, SSE2 (no AVX), and
//!
//! - RDI = address of this vCPU's parameter block: [`PARAMETERS`] words shared with the host,
//! - RSI = number of the vCPU,
//! - RSP = top of a stack of about 120 KiB, aligned as after a call.
//!
//! It ends by `out` of EAX to [`crate::EXIT_STATUS_PORT`]. The window is mapped write-back at an
//! address of the caller's choice, so that it can be the same one as in the host's process.
//!
//! ```text
//! 0       .. 2 MiB        page tables and exception handlers, not visible to the payload
//! 2 MiB   .. memory-2 MiB the program, one to one; 2 MiB pages with the segments' permissions
//! memory-2 MiB .. memory  parameter blocks and stacks, 128 KiB per vCPU
//! ```

pub(crate) mod elf;
mod exceptions;
mod paging;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvm_bindings::kvm_regs;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::bus::{BusDevice, BusError, Buses, Effect};
use crate::cpu::{self, CpuError};
use crate::devices::power;
use crate::exit_reason::ExitReason;
use crate::memory::{self, Range, WINDOW_ALIGN, WINDOW_UNIT, Window};
use crate::ram::GuestRam;
use crate::stats::{Stats, VmStats};
use crate::vcpu::{End, Event, ExitCounters, ExitCounts, StopHandle, VcpuThreads};
use crate::vm::{DisabledExits, VmError, kvm_error};

/// Words in a parameter block.
pub const PARAMETERS: usize = 512;
/// vCPUs that a payload's VM may have.
pub const MAX_PAYLOAD_VCPUS: usize = 16;

const PROGRAM_START: u64 = paging::PAGE;
/// Page tables lie between here and the exception handlers: enough for a window of 200 GiB.
const TABLES_START: u64 = 0x1000;
const TABLES_END: u64 = 0x10_0000;
/// Parameter block and stack of one vCPU.
const VCPU_AREA: u64 = paging::PAGE / MAX_PAYLOAD_VCPUS as u64;
/// Interrupts stay off; the I/O privilege level allows user mode to use ports.
const RFLAGS: u64 = 2 | 3 << 12;
const USER_ADDRESS_END: u64 = 1 << 47;

/// Why a payload could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {
    /// The file is no payload.
    #[error("the payload is no static program: {what}")]
    NotAProgram {
        /// What is wrong.
        what: &'static str,
    },
    /// A segment lies where no private memory is.
    #[error(
        "the payload has a segment of {bytes} bytes at {address:#x}; segments must lie between \
         {low:#x} and {high:#x}"
    )]
    Segment {
        /// Where it is.
        address: u64,
        /// Its size.
        bytes: u64,
        /// First possible address.
        low: u64,
        /// End of possible addresses.
        high: u64,
    },
    /// The private memory is too small or too large.
    #[error("a payload cannot have {mib} MiB of memory: an even number between 8 and 1024 MiB")]
    MemorySize {
        /// What was asked for.
        mib: u64,
    },
    /// Too many or no vCPUs.
    #[error("a payload cannot have {count} vCPUs: between 1 and {MAX_PAYLOAD_VCPUS} are possible")]
    Vcpus {
        /// How many parameter blocks were given.
        count: usize,
    },
    /// A parameter block is too long.
    #[error("vCPU {vcpu} has {words} parameters, more than {PARAMETERS} are not possible")]
    Parameters {
        /// Whose.
        vcpu: usize,
        /// How many.
        words: usize,
    },
    /// The window cannot be mapped there.
    #[error(
        "the window of {bytes} bytes cannot be at {address:#x}: it needs a multiple of 2 MiB above \
         the payload's memory and below {USER_ADDRESS_END:#x}"
    )]
    WindowAddress {
        /// Where it should be.
        address: u64,
        /// Its size.
        bytes: u64,
    },
    /// The window is too large for the page tables.
    #[error("a window of {bytes} bytes is too large for a payload")]
    WindowTooLarge {
        /// Its size.
        bytes: u64,
    },
    /// Guest memory could not be written.
    #[error("cannot write the payload to guest memory")]
    Write(#[from] GuestMemoryError),
}

/// A window and where the payload sees it.
#[derive(Debug)]
pub struct PayloadWindow {
    /// The memfd, sealed against resizing, a multiple of 2 MiB.
    pub memfd: OwnedFd,
    /// The payload's address for it, a multiple of 2 MiB.
    pub address: u64,
}

/// A payload to be run.
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
    /// The watchdog: the VM is stopped after this time.
    pub timeout: Option<Duration>,
    /// Exits to do without.
    pub disabled_exits: DisabledExits,
}

/// Everything known after a payload has ended.
#[derive(Debug, Clone)]
pub struct PayloadReport {
    /// [`ExitReason::Exited`] with the first status that is not 0, or 0, if all vCPUs ended by
    /// themselves; otherwise what ended the VM.
    pub outcome: ExitReason,
    /// The statuses of those vCPUs that ended by themselves.
    pub statuses: BTreeMap<u8, u32>,
    /// How long it ran.
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
    /// Reads a word (Acquire); `None` past the end.
    pub fn load(&self, index: usize) -> Option<u64> {
        let at = self.word(index)?;
        self.ram.load(at, Ordering::Acquire).ok()
    }

    /// Writes a word (Release); `false` past the end.
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
    blocks: Vec<ParameterBlock>,
    stats: VmStats,
    counters: Arc<ExitCounters>,
    events: (Sender<Event>, Receiver<Event>),
    timeout: Option<Duration>,
    ram: GuestRam,
    // Dropped after the vCPUs, which use them.
    _vm: VmFd,
    window: Option<Window>,
}

impl PayloadVm {
    /// Makes the VM and loads the payload.
    pub fn new(config: PayloadConfig) -> Result<Self, VmError> {
        check(&config)?;
        let kvm = Kvm::new().map_err(kvm_error("/dev/kvm"))?;
        let vm = kvm.create_vm().map_err(kvm_error("a VM"))?;
        config.disabled_exits.apply(&vm)?;
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
            vcpu.set_cpuid2(&cpu::cpuid_of(&kvm, &supported, id))
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
            blocks,
            stats,
            counters: Arc::new(ExitCounters::default()),
            events: channel(),
            timeout: config.timeout,
            ram,
            _vm: vm,
            window,
        })
    }

    /// The parameter block of a vCPU.
    pub fn parameters(&self, vcpu: usize) -> Option<ParameterBlock> {
        self.blocks.get(vcpu).cloned()
    }

    /// Ends the VM from another thread.
    pub fn stop_handle(&self) -> StopHandle {
        StopHandle::new(self.events.0.clone())
    }

    /// The window, parts of which can be replaced while the payload runs.
    pub fn window(&self) -> Option<Window> {
        self.window.clone()
    }

    /// KVM's statistics, readable from any thread while the VM runs and after.
    pub fn stats(&self) -> VmStats {
        self.stats.clone()
    }

    /// Counts of exits to the monitor, readable from any thread.
    pub fn exit_counters(&self) -> Arc<ExitCounters> {
        Arc::clone(&self.counters)
    }

    /// Runs until every vCPU's program has ended, or one fails.
    pub fn run(self) -> Result<PayloadReport, VmError> {
        self.run_on(buses()?)
    }

    /// The same with other devices.
    pub(crate) fn run_on(self, buses: Buses) -> Result<PayloadReport, VmError> {
        let count = self.vcpus.len();
        let buses = Arc::new(buses);
        let (sender, receiver) = &self.events;
        let mut statuses = BTreeMap::new();
        let start = Instant::now();
        let threads = VcpuThreads::start(self.vcpus, &buses, &self.counters, sender)?;
        let outcome = threads.wait(receiver, self.timeout, |end| match end.end {
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

/// Refuses what cannot be before anything is made.
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

/// Maps handlers, program, parameter blocks and stacks, one to one.
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
        // A page that several segments share allows what any of them needs; one that none touches
        // is not mapped.
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

/// Puts a vCPU at the payload's entry, in user mode.
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
        // As after a call: the return address would lie here.
        rsp: block + VCPU_AREA - 8,
        rdi: block,
        rsi: u64::from(id),
        rflags: RFLAGS,
        ..Default::default()
    })
    .map_err(set("registers"))
}

/// [`power::EXIT_STATUS`]: a payload ends with its status at once.
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

/// [`exceptions::PORT`]: the handlers of exceptions write to it.
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

/// The two ports of a payload; there is nothing else.
fn buses() -> Result<Buses, BusError> {
    let buses = Buses::default();
    let exit = Arc::new(Mutex::new(ExitPort));
    buses.ports.insert(power::EXIT_STATUS.into(), 1, exit)?;
    let exception = Arc::new(Mutex::new(ExceptionPort));
    buses.ports.insert(exceptions::PORT.into(), 1, exception)?;
    Ok(buses)
}

//! Confines the threads that serve a guest: namespaces, capabilities, Landlock and seccomp.
//!
//! Before it reads the first byte of guest data, each vCPU thread and each device thread drops its capabilities, its
//! access to the file system and every system call that is not in its allowlist. An attacker who takes over a device's
//! code still reaches the memory of the process, and through it the other threads. A process that only runs a VM should
//! therefore filter all its threads: the filter allows [`calls`] and the calls that the caller needs itself.

use std::io;

use kvm_bindings::{
    KVMIO, kvm_clock_data, kvm_debugregs, kvm_irq_routing, kvm_irqchip, kvm_irqfd, kvm_lapic_state,
    kvm_mp_state, kvm_msrs, kvm_pit_state2, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs,
    kvm_xsave,
};
use wormhole_privileges::{
    Calls, Denial, FilesError, Filter, FilterError, all_masked, drop_capabilities, equals,
    equals_one_of, leave_file_system, masked, report_denied_calls,
};

use crate::ram::COLLAPSED;

vmm_sys_util::ioctl_io_nr!(KVM_RUN, KVMIO, 0x80);
vmm_sys_util::ioctl_ior_nr!(KVM_GET_REGS, KVMIO, 0x81, kvm_regs);
vmm_sys_util::ioctl_ior_nr!(KVM_GET_SREGS, KVMIO, 0x83, kvm_sregs);
vmm_sys_util::ioctl_iowr_nr!(KVM_GET_MSRS, KVMIO, 0x88, kvm_msrs);
vmm_sys_util::ioctl_ior_nr!(KVM_GET_LAPIC, KVMIO, 0x8e, kvm_lapic_state);
vmm_sys_util::ioctl_ior_nr!(KVM_GET_MP_STATE, KVMIO, 0x98, kvm_mp_state);
vmm_sys_util::ioctl_ior_nr!(KVM_GET_VCPU_EVENTS, KVMIO, 0x9f, kvm_vcpu_events);
vmm_sys_util::ioctl_ior_nr!(KVM_GET_DEBUGREGS, KVMIO, 0xa1, kvm_debugregs);
vmm_sys_util::ioctl_io_nr!(KVM_GET_TSC_KHZ, KVMIO, 0xa3);
vmm_sys_util::ioctl_ior_nr!(KVM_GET_XSAVE, KVMIO, 0xa4, kvm_xsave);
vmm_sys_util::ioctl_ior_nr!(KVM_GET_XCRS, KVMIO, 0xa6, kvm_xcrs);
vmm_sys_util::ioctl_io_nr!(KVM_KVMCLOCK_CTRL, KVMIO, 0xad);
vmm_sys_util::ioctl_iowr_nr!(KVM_GET_IRQCHIP, KVMIO, 0x62, kvm_irqchip);
vmm_sys_util::ioctl_ior_nr!(KVM_GET_CLOCK, KVMIO, 0x7c, kvm_clock_data);
vmm_sys_util::ioctl_ior_nr!(KVM_GET_PIT2, KVMIO, 0x9f, kvm_pit_state2);
vmm_sys_util::ioctl_iow_nr!(KVM_SET_GSI_ROUTING, KVMIO, 0x6a, kvm_irq_routing);
vmm_sys_util::ioctl_iow_nr!(KVM_IRQFD, KVMIO, 0x76, kvm_irqfd);
vmm_sys_util::ioctl_io_nr!(VFIO_DEVICE_SET_IRQS, VFIO_TYPE, VFIO_BASE + 10);
vmm_sys_util::ioctl_io_nr!(VFIO_DEVICE_RESET, VFIO_TYPE, VFIO_BASE + 11);
vmm_sys_util::ioctl_io_nr!(VFIO_IOMMU_MAP_DMA, VFIO_TYPE, VFIO_BASE + 13);
vmm_sys_util::ioctl_io_nr!(VFIO_IOMMU_UNMAP_DMA, VFIO_TYPE, VFIO_BASE + 14);

/// Type and first number of VFIO's requests.
const VFIO_TYPE: u32 = vfio_bindings::bindings::vfio::VFIO_TYPE as u32;
const VFIO_BASE: u32 = vfio_bindings::bindings::vfio::VFIO_BASE;

/// Error from confining a thread.
#[derive(Debug, thiserror::Error)]
pub enum ConfinementError {
    /// The seccomp filter cannot be compiled or installed.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// Landlock cannot restrict the thread.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// The capabilities cannot be dropped.
    #[error("the thread's capabilities cannot be dropped")]
    Capabilities(#[source] io::Error),
    /// The SIGSYS handler cannot be installed.
    #[error("denied system calls cannot be reported")]
    Report(#[source] io::Error),
}

/// System calls of every thread: memory, locks, eventfds, clocks, exit.
const COMMON: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_close,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    // The allocator reads the number of processors.
    libc::SYS_sched_getaffinity,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Additional system calls of a vCPU thread: it reads KVM's statistics for the exit accounts.
const VCPU: &[i64] = &[libc::SYS_pread64];

/// Additional system calls of the device thread: its event loop, and the sockets of vsock connections.
const DEVICE: &[i64] = &[
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_ctl,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
];

/// Additional system calls of a disk's thread: its event loop, and I/O on its image.
const DISK: &[i64] = &[
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_ctl,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_fdatasync,
    libc::SYS_fallocate,
];

/// Additional system calls of an event loop: all that the balloon's thread needs. A network interface's thread also writes
/// frames from several buffers, and a file system's thread has the packets of its server.
const EVENT_LOOP: &[i64] = &[
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_ctl,
];

/// System calls that fail with ENOSYS instead of raising SIGSYS. Libraries make them and have a fallback: for the
/// number of processors, or for the source lines of a backtrace.
const ABSENT: &[i64] = &[
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_getcwd,
    libc::SYS_stat,
    libc::SYS_statx,
];

fn common() -> Result<Calls, FilterError> {
    let executable = libc::PROT_EXEC.unsigned_abs().into();
    let own = std::process::id().into();
    let collapse = libc::MADV_COLLAPSE.unsigned_abs().into();
    let collapsed = all_masked(&[
        (1, !(2 * COLLAPSED as u64 - 1), 0),
        (2, u32::MAX.into(), collapse),
    ])?;
    Ok(Calls::any(COMMON)
        .and_advice()?
        // For a window that is prefaulted.
        .and_where(libc::SYS_madvise, vec![collapsed])
        // No executable memory: neither a new mapping nor a changed one.
        .and_where(libc::SYS_mmap, vec![masked(2, executable, 0)?])
        .and_where(libc::SYS_mprotect, vec![masked(2, executable, 0)?])
        // No signal to another process.
        .and_where(libc::SYS_tgkill, vec![equals(0, own)?])
        // The report of a denied call names the thread.
        .and_where(
            libc::SYS_prctl,
            vec![equals(0, libc::PR_GET_NAME.unsigned_abs().into())?],
        )
        // A debug build's standard library checks with F_GETFD that a descriptor is open before it closes it.
        .and_where(
            libc::SYS_fcntl,
            equals_one_of(
                1,
                [libc::F_GETFD, libc::F_DUPFD_CLOEXEC].map(|command| command.unsigned_abs().into()),
            )?,
        )
        .without(ABSENT))
}

fn of_vcpus() -> Result<Calls, FilterError> {
    let requests = [
        KVM_RUN(),
        KVM_GET_REGS(),
        KVM_GET_SREGS(),
        KVM_SET_GSI_ROUTING(),
        // For snapshots.
        KVM_GET_MSRS(),
        KVM_GET_LAPIC(),
        KVM_GET_MP_STATE(),
        KVM_GET_VCPU_EVENTS(),
        KVM_GET_DEBUGREGS(),
        KVM_GET_TSC_KHZ(),
        KVM_GET_XSAVE(),
        KVM_GET_XCRS(),
        KVM_KVMCLOCK_CTRL(),
    ];
    let requests = equals_one_of(1, requests)?;
    Ok(common()?.and(VCPU).and_where(libc::SYS_ioctl, requests))
}

/// Further calls of a vCPU's thread whose VM has devices of the host: accesses to a device's registers that are not mapped,
/// and changes of its interrupts.
fn of_vcpus_with_devices() -> Result<Calls, FilterError> {
    let requests = equals_one_of(1, [KVM_IRQFD(), VFIO_DEVICE_SET_IRQS()])?;
    Ok(of_vcpus()?
        .and(&[libc::SYS_pwrite64])
        .and_where(libc::SYS_ioctl, requests))
}

/// Returns the system calls of [`calls`], and those that a process makes whose VM has devices of the host. Windows that are
/// attached and detached enter and leave the IOMMU's table, and the devices are reset at the VM's end.
///
/// # Errors
/// As for [`calls`].
pub fn calls_with_devices() -> Result<Calls, FilterError> {
    // The first one has the number of a device's hot reset as well, for which the process would need a descriptor of each
    // group that this resets.
    let requests = [
        VFIO_IOMMU_MAP_DMA(),
        VFIO_IOMMU_UNMAP_DMA(),
        VFIO_DEVICE_RESET(),
    ];
    let requests = equals_one_of(1, requests)?;
    Ok(calls()?
        .and_all(of_vcpus_with_devices()?)
        .and_where(libc::SYS_ioctl, requests))
}

fn of_devices() -> Result<Calls, FilterError> {
    let unix = libc::AF_UNIX.unsigned_abs().into();
    Ok(common()?
        .and(DEVICE)
        .and_waits(libc::SYS_poll, 1)?
        .and_waits(libc::SYS_ppoll, 1)?
        .and_where(libc::SYS_socketpair, vec![equals(0, unix)?])
        .and_where(libc::SYS_ioctl, vec![equals(1, libc::FIONBIO)?]))
}

fn of_disks() -> Result<Calls, FilterError> {
    /// `IORING_ENTER_GETEVENTS`.
    const GETEVENTS: u64 = 1;
    // The ring is set up and restricted before.
    Ok(common()?
        .and(DISK)
        .and_where(libc::SYS_io_uring_enter, vec![masked(3, !GETEVENTS, 0)?]))
}

fn of_networks() -> Result<Calls, FilterError> {
    let offloads = libc::TUNSETOFFLOAD;
    Ok(common()?
        .and(EVENT_LOOP)
        .and(&[libc::SYS_writev])
        .and_where(libc::SYS_ioctl, vec![equals(1, offloads)?]))
}

fn of_file_systems() -> Result<Calls, FilterError> {
    Ok(common()?
        .and(EVENT_LOOP)
        .and(&[libc::SYS_recvfrom, libc::SYS_sendto]))
}

fn of_balloons() -> Result<Calls, FilterError> {
    Ok(common()?.and(EVENT_LOOP))
}

/// System calls by which a thread confines itself.
const GIVING_UP: &[i64] = &[
    libc::SYS_capset,
    libc::SYS_seccomp,
    libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_restrict_self,
];

/// Returns the union of the system calls that a VM's threads make from the start of [`crate::Vm::run`] on. A process
/// that runs a VM allows them in its own filter. Install that filter before any other thread is confined.
///
/// # Errors
/// Only if the lists of this module are inconsistent.
pub fn calls() -> Result<Calls, FilterError> {
    let giving_up = [
        libc::PR_CAPBSET_DROP,
        libc::PR_CAP_AMBIENT,
        libc::PR_SET_NO_NEW_PRIVS,
    ];
    let giving_up = giving_up.map(|operation| operation.unsigned_abs().into());
    let giving_up = equals_one_of(0, giving_up)?;
    let chips = equals_one_of(1, [KVM_GET_IRQCHIP(), KVM_GET_CLOCK(), KVM_GET_PIT2()])?;
    // A vCPU's thread binds itself to a processor before it confines itself.
    let itself = vec![equals(0, 0)?];
    Ok(of_vcpus()?
        .and_all(of_devices()?)
        .and_all(of_disks()?)
        .and_all(of_networks()?)
        .and_all(of_file_systems()?)
        .and_all(of_balloons()?)
        // The thread of `run` takes snapshots: reads the chips of KVM, and examines the disks.
        .and(&[libc::SYS_fstat])
        .and_where(libc::SYS_ioctl, chips)
        .and(GIVING_UP)
        .and_where(libc::SYS_sched_setaffinity, itself)
        .and_where(libc::SYS_prctl, giving_up))
}

/// Moves this thread, and those that it starts from now on, to namespaces without a network. Call it before
/// [`crate::Vm::new`], which starts the devices' threads, when everything that needs the host's network is open: taps and
/// sockets stay usable. Threads that are there already stay in the host's namespaces.
///
/// Root has the right. Another user would need a user namespace, which the kernel refuses to a process with several threads;
/// the filters alone keep the network away then.
pub fn leave_namespaces() {
    if let Err(error) = wormhole_privileges::leave_namespaces() {
        tracing::debug!(%error, "a guest's threads stay in the host's namespaces");
    }
}

/// Compiled filter of one kind of thread, prepared before the threads start.
#[derive(Clone, Debug)]
pub(crate) struct Confinement(Filter);

impl Confinement {
    /// Prepares the confinement of a thread that runs a vCPU and handles its exits.
    pub fn of_vcpu() -> Result<Self, ConfinementError> {
        Self::of(of_vcpus()?)
    }

    /// Prepares the confinement of a vCPU's thread whose VM has devices of the host.
    pub fn of_vcpu_with_devices() -> Result<Self, ConfinementError> {
        Self::of(of_vcpus_with_devices()?)
    }

    /// Prepares the confinement of the thread that serves the queues of the devices without a thread of their own.
    pub fn of_devices() -> Result<Self, ConfinementError> {
        Self::of(of_devices()?)
    }

    /// Prepares the confinement of a thread that serves a disk's queues.
    pub fn of_disk() -> Result<Self, ConfinementError> {
        Self::of(of_disks()?)
    }

    /// Prepares the confinement of a thread that serves a network interface's queues.
    pub fn of_network() -> Result<Self, ConfinementError> {
        Self::of(of_networks()?)
    }

    /// Prepares the confinement of a thread that serves a file system's queues.
    pub fn of_file_system() -> Result<Self, ConfinementError> {
        Self::of(of_file_systems()?)
    }

    /// Prepares the confinement of the thread that serves the balloon's queues.
    pub fn of_balloon() -> Result<Self, ConfinementError> {
        Self::of(of_balloons()?)
    }

    fn of(calls: Calls) -> Result<Self, ConfinementError> {
        report_denied_calls().map_err(ConfinementError::Report)?;
        Ok(Self(calls.compile(Denial::Signal)?))
    }

    /// Confines the calling thread irrevocably.
    pub fn enter(&self) -> Result<(), ConfinementError> {
        drop_capabilities().map_err(ConfinementError::Capabilities)?;
        leave_file_system()?;
        Ok(self.0.install()?)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;
    use std::sync::mpsc::{Sender, channel};

    use event_manager::EventOps;
    use wormhole_lock::Mutex;
    use wormhole_privileges::attempts::{all_are_denied, asked, attempt};

    use super::*;
    use crate::bus::{BusDevice, Buses, Effect};
    use crate::device_thread::DeviceThread;
    use crate::devices::power;
    use crate::devices::virtio::{ActiveQueue, ServerHandle, VirtioWorker};
    use crate::disabled_exits::DisabledExits;
    use crate::payload::elf::tests::program;
    use crate::payload::{PayloadConfig, PayloadVm};
    use crate::{ExitReason, KvmCaps};

    /// Returns CapPrm, CapBnd, NoNewPrivs and Seccomp of a thread of this process.
    fn standing(thread: i32) -> Vec<String> {
        let status = fs::read_to_string(format!("/proc/self/task/{thread}/status"));
        let wanted = ["CapPrm:", "CapBnd:", "NoNewPrivs:", "Seccomp:"];
        let status = status.expect("the thread is there");
        wanted
            .iter()
            .filter_map(|name| status.lines().find_map(|line| line.strip_prefix(name)))
            .map(|value| value.trim().to_owned())
            .collect()
    }

    /// Returns whether a thread has no permitted capabilities, an empty bounding set if the process runs as root, and a
    /// seccomp filter.
    fn confined(thread: i32) -> bool {
        let standing = standing(thread);
        let root = rustix::process::geteuid().is_root();
        let none = "0000000000000000";
        standing[0] == none && (!root || standing[1] == none) && standing[2..] == ["1", "2"]
    }

    /// Sends its thread id when its queue is notified, after the requested attempt, if any.
    #[derive(Debug)]
    struct Worker(Sender<i32>);

    impl VirtioWorker for Worker {
        fn start(&mut self, _: Vec<ActiveQueue>, _: u64) {}
        fn queue_ready(&mut self, _: usize, _: &mut EventOps<'_>) {
            if let Some(call) = asked() {
                attempt(&call);
            }
            // The receiver is gone if the test has ended.
            let _ = self.0.send(thread_number());
        }
        fn stop(&mut self) {}
    }

    fn thread_number() -> i32 {
        rustix::thread::gettid().as_raw_nonzero().get()
    }

    fn has_its_calls_and_no_others(name: &str, confinement: Confinement, test: &str) {
        let thread = DeviceThread::start(name).expect("a thread");
        thread.confine(confinement).expect("confined");
        let (sender, numbers) = channel();
        let worker = Box::new(Worker(sender));
        let mut server = ServerHandle::new(thread.handle(), worker, 1).expect("eventfds");
        server.start(Vec::new(), 0).expect("the thread is there");
        let number = numbers.recv().expect("a number");
        assert!(confined(number), "{:?}", standing(number));
        assert!(!confined(thread_number()));
        all_are_denied(&format!("confinement::tests::{test}"), name);
    }

    #[test]
    fn the_device_thread_has_its_calls_and_no_others() {
        let test = "the_device_thread_has_its_calls_and_no_others";
        let confinement = Confinement::of_devices().expect("a list");
        has_its_calls_and_no_others("devices", confinement, test);
    }

    #[test]
    fn a_disk_thread_has_its_calls_and_no_others() {
        let test = "a_disk_thread_has_its_calls_and_no_others";
        let confinement = Confinement::of_disk().expect("a list");
        has_its_calls_and_no_others("disk-0", confinement, test);
    }

    #[test]
    fn the_balloon_thread_has_its_calls_and_no_others() {
        let test = "the_balloon_thread_has_its_calls_and_no_others";
        let confinement = Confinement::of_balloon().expect("a list");
        has_its_calls_and_no_others("balloon", confinement, test);
    }

    #[test]
    fn a_network_thread_has_its_calls_and_no_others() {
        let test = "a_network_thread_has_its_calls_and_no_others";
        let confinement = Confinement::of_network().expect("a list");
        has_its_calls_and_no_others("net-0", confinement, test);
    }

    #[test]
    fn a_file_system_thread_has_its_calls_and_no_others() {
        let test = "a_file_system_thread_has_its_calls_and_no_others";
        let confinement = Confinement::of_file_system().expect("a list");
        has_its_calls_and_no_others("fs", confinement, test);
    }

    /// Port that ends the payload on a write. It sends the vCPU thread's id first and waits until the test has read the
    /// thread's status.
    #[derive(Debug)]
    struct Port {
        number: Sender<i32>,
        looked_at: Arc<std::sync::Barrier>,
    }

    impl BusDevice for Port {
        fn read(&mut self, _: u64, _: &mut [u8]) {}
        fn write(&mut self, _: u64, _: &[u8]) -> Effect {
            if let Some(call) = asked() {
                attempt(&call);
            }
            self.number.send(thread_number()).expect("the test waits");
            self.looked_at.wait();
            Effect::Exited(0)
        }
    }

    #[test]
    fn a_vcpu_thread_has_its_calls_and_no_others() {
        if let KvmCaps::Missing { why } | KvmCaps::Denied { why } = crate::probe() {
            eprintln!("skipped: {why}");
            return;
        }
        // mov edx, EXIT_STATUS; out dx, eax; and bytes that are not reached.
        let [low, high] = power::EXIT_STATUS.to_le_bytes();
        let code = [0xba, low, high, 0, 0, 0xef, 0xf4, 0xf4];
        let vm = PayloadVm::new(PayloadConfig {
            elf: program(code, 2 << 20, 4096),
            parameters: vec![Vec::new()],
            memory_mib: 8,
            window: None,
            timeout: None,
            disabled_exits: DisabledExits::default(),
            pins: Vec::new(),
            doorbell: None,
        });
        let (number, numbers) = channel();
        let looked_at = Arc::new(std::sync::Barrier::new(2));
        let port = Arc::new(Mutex::new(Port {
            number,
            looked_at: Arc::clone(&looked_at),
        }));
        let buses = Buses::default();
        let start = power::EXIT_STATUS.into();
        buses.ports.insert(start, 1, port).expect("free");
        let vm = vm.expect("a VM");
        let running = std::thread::spawn(move || vm.run_on(buses));
        let number = numbers.recv().expect("a number");
        let standing = (confined(number), standing(number));
        looked_at.wait();
        let report = running.join().expect("no panic").expect("it runs");
        assert!(standing.0, "{:?}", standing.1);
        assert_eq!(report.outcome, ExitReason::Exited { status: 0 });
        all_are_denied(
            "confinement::tests::a_vcpu_thread_has_its_calls_and_no_others",
            "vcpu0",
        );
    }

    #[test]
    fn a_process_can_have_the_calls_of_all_threads() {
        for calls in [calls(), calls_with_devices()] {
            calls
                .and_then(|calls| calls.compile(Denial::Signal))
                .expect("a filter");
        }
    }
}

//! Cgroups for workers, for their tenants, and for all of them: memory, tasks and processors that the kernel counts for
//! each.
//!
//! All are in a cgroup that was delegated to the supervisor, and nowhere else (`wormhole-cgroups`). Below it:
//!
//! | cgroup | what |
//! |---|---|
//! | `supervisor` | the processes of the delegated cgroup, since a cgroup that limits its children may hold no processes. The root of the hierarchy is exempt, so its processes stay where they are. `cpu.weight` is 10000: these processes come before all workers |
//! | `workers-PID` | the cgroups of one supervisor, which holds a lock on the folder while it lives: limits of memory and tasks for all workers |
//! | `workers-PID/spare` | idle workers, which have no session yet |
//! | `workers-PID/refused` | the processes that refuse connections, with little memory and a usual share of the processors |
//! | `workers-PID/user-U` | the tenants of one user, those that are there and those that have left: a limit of memory, and the same `cpu.weight` as every other user |
//! | `workers-PID/user-U/tenant-T` | the processes of one tenant, or of the user's next one: limits of memory and tasks, and the same `cpu.weight` as the user's other tenants. In `workers-PID` if the supervisor serves one tenant alone |
//! | `workers-PID/user-U/tenant-T/loop` | the supervisor's processes that serve this tenant. `cpu.weight` is 10000: they come before the tenant's workers |
//! | `spare/N`, `tenant-T/N` | one worker, with a limit of tasks. It starts in `spare`, and moves to its tenant's cgroup with its first session |
//!
//! The memory of a worker is limited by its tenant's cgroup. To make a cgroup with the memory controller charges the parent,
//! so that the process that makes one below a tenant at its limit reclaims the tenant's memory itself, while it holds a
//! lock that all cgroups of the system share. A worker can make that take minutes. Only where tenants trust each other
//! and the operator limits the memory of each worker, a worker's cgroup has that controller.
//!
//! A worker's cgroup is removed when the worker is reaped, a tenant's when its processes have ended and nothing is charged
//! to it any more ([`charge`](super::charge)), the rest when the supervisor ends. A supervisor that is killed leaves empty
//! cgroups. The next supervisor in the same place finds no lock on them and removes them; systemd removes them with the
//! unit.
//!
//! A small charge that a tenant leaves may be memory that the kernel has freed and not uncharged yet. Such a charge moves to
//! the tenant's user, and the tenant's cgroup is removed. Once these charges are more than a part of the user's limit,
//! further cgroups of the user's tenants stay until they are empty.
//!
//! The kernel charges a page of shared memory to the cgroup that touches it first. Any part of a window may therefore
//! count as a worker's; of a static window, which its guest has mapped whole, any part may count as the guest's monitor's,
//! outside of all these cgroups. The charge stays with the tenant when the worker ends. Pages that a worker touched before it moved
//! stay charged to `spare`. A limit must have room for the parts of the window that are in use and for the device memory
//! that the worker holds. A guest that makes its worker touch many pages comes closer to the limit of that worker, and to
//! that of its tenant.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use rustix::event::Timespec;
use rustix::fs::{FlockOperation, flock};
use wormhole_cgroups::{
    CONTROLLERS, CgroupError, Delegated, LEAF, children, enable, failed, own_place, read,
    wait_until_empty, write,
};
use wormhole_link::operator::LEAST_MEMORY;
use wormhole_lock::Mutex;

use super::charge;

const WORKERS: &str = "workers-";
const SPARE: &str = "spare";
const USER: &str = "user-";
const TENANT: &str = "tenant-";
const LOOP: &str = "loop";
const REFUSED: &str = "refused";
/// Controller of `memory.max`.
const MEMORY: &str = "memory";
/// Controller of `cpu.weight`. A tenant has no share of the processors without it.
const PROCESSORS: &str = "cpu";
/// The highest `cpu.weight`; the default is 100 (cgroup v2, "CPU Interface Files").
const FIRST_WEIGHT: &str = "10000";
/// Part of a user's limit of memory that its tenants may leave together before the cgroups of further ones stay.
const LEFT: u64 = 16;
/// Time that an abandoned worker may take to end.
const PATIENCE: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// Limits of one resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Limit for one worker.
    pub worker: u64,
    /// Limit for all workers of one tenant.
    pub tenant: u64,
    /// Limit for all tenants of one user.
    pub user: u64,
    /// Limit for all workers.
    pub all: u64,
}

/// Limits of all resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of memory.
    pub memory: Limit,
    /// Whether each worker's cgroup limits its memory.
    pub by_worker: bool,
    /// Threads.
    pub tasks: Limit,
}

impl Limits {
    /// Limits that leave a quarter of what this process may have to others. There are at most `users` users, each with
    /// `tenants` tenants, each with `sessions` sessions, whose workers have at most `threads` threads. Memory is divided
    /// equally among the tenants, unless `worker` or `tenant` gives the bytes for one of them. Threads are not: an equal
    /// share would be less than an honest tenant needs. A tenant may have as many as its sessions need, but not the second
    /// half while there may be other tenants.
    pub fn of(
        worker: Option<u64>,
        tenant: Option<u64>,
        (users, tenants): (usize, usize),
        (sessions, threads): (usize, u64),
    ) -> Self {
        let (users, tenants, sessions) = (users as u64, tenants as u64, sessions as u64);
        Self {
            memory: memory_limit(memory(), worker, tenant, (users, tenants)),
            by_worker: worker.is_some() && users.saturating_mul(tenants) <= 1,
            tasks: task_limit(tasks(), users.saturating_mul(tenants), (sessions, threads)),
        }
    }
}

fn memory_limit(
    system: u64,
    worker: Option<u64>,
    tenant: Option<u64>,
    (users, tenants): (u64, u64),
) -> Limit {
    let named = worker.max(tenant).unwrap_or(0);
    let all = (system / 4 * 3).max(LEAST_MEMORY).max(named);
    let share = (all / users.saturating_mul(tenants).max(1)).max(LEAST_MEMORY);
    let tenant = tenant.unwrap_or_else(|| share.max(worker.unwrap_or(0)));
    Limit {
        // The CPU device reports this number as its memory, which must not exceed the tenant's limit.
        worker: worker.unwrap_or(tenant),
        tenant,
        user: tenant.saturating_mul(tenants).min(all),
        all,
    }
}

fn task_limit(system: u64, tenants: u64, (sessions, worker): (u64, u64)) -> Limit {
    let all = system / 4 * 3;
    let most = if tenants > 1 { all / 2 } else { all };
    Limit {
        worker,
        tenant: most.min(sessions.saturating_mul(worker)),
        user: all,
        all,
    }
}

/// Returns the system's bytes of memory, or the least `memory.max` of this process's cgroup and those above.
fn memory() -> u64 {
    let system = rustix::system::sysinfo();
    let all = system.totalram.saturating_mul(system.mem_unit.into());
    all.min(limit_above("memory.max"))
}

/// Returns the system's limit of threads, or the least `pids.max` of this process's cgroup and those above.
fn tasks() -> u64 {
    let of_system = ["/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"]
        .map(|file| number(Path::new(file)).unwrap_or(u64::MAX));
    let of_system = of_system[0].min(of_system[1]);
    of_system.min(limit_above("pids.max"))
}

/// Returns the least value of a limit in the cgroup of this process and in those above.
fn limit_above(file: &str) -> u64 {
    let Ok((mount, place)) = own_place() else {
        return u64::MAX;
    };
    let own = mount.join(place);
    let cgroups = own.ancestors().take_while(|path| path.starts_with(&mount));
    let limits = cgroups.filter_map(|path| number(&path.join(file)));
    limits.min().unwrap_or(u64::MAX)
}

/// Reads the number in a file; `None` if the file holds `max` or is missing.
fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Cgroup in which this supervisor makes those of its workers.
#[derive(Debug)]
pub struct Cgroups {
    directory: PathBuf,
    /// Lock (flock(2)) that shows other supervisors that this one lives.
    _lock: File,
    limits: Limits,
    controllers: Vec<&'static str>,
    next: AtomicU64,
    spare: Arc<Level>,
    /// Levels of the tenants that have processes, by the tenant's number.
    tenants: Mutex<BTreeMap<u32, Weak<Level>>>,
    /// Places in these levels for the processes that serve the tenants.
    places: Mutex<BTreeMap<u32, Weak<Level>>>,
    /// Users of the tenants that have a cgroup in that of their user.
    users: Mutex<BTreeMap<u32, u32>>,
}

impl Cgroups {
    /// Splits the supervisor's own cgroup, and removes cgroups of supervisors that were killed.
    ///
    /// # Errors
    /// Fails if no cgroup is delegated to this process, or if the kernel refuses to split it.
    pub fn prepare(limits: Limits) -> Result<Self, CgroupError> {
        let delegated = Delegated::find()?;
        let base = delegated.path();
        remove_abandoned(base);
        delegated.split()?;
        let mut controllers = CONTROLLERS.to_vec();
        // A kernel with CONFIG_RT_GROUP_SCHED refuses the cpu controller while a realtime process is outside the root.
        if delegated.has(PROCESSORS) && enable(base, &[PROCESSORS]).is_ok() {
            controllers.push(PROCESSORS);
            let own = base.join(LEAF).join("cpu.weight");
            if own.exists() {
                write(&own, FIRST_WEIGHT)?;
            }
        }
        let (directory, lock) = own_directory(base)?;
        let cgroups = Self {
            // Stays until `remove_tree` removes the whole directory.
            spare: Level::new(directory.join(SPARE), true),
            directory,
            _lock: lock,
            limits,
            controllers,
            next: AtomicU64::new(0),
            tenants: Mutex::default(),
            places: Mutex::default(),
            users: Mutex::default(),
        };
        limit(&cgroups.directory, limits.memory.all, limits.tasks.all)?;
        enable(&cgroups.directory, &cgroups.controllers)?;
        let (memory, tasks) = (limits.memory.all, limits.tasks.all);
        cgroups.make_level(&cgroups.spare.path, (memory, tasks), &cgroups.of_workers())?;
        let refused = cgroups.refused();
        fs::create_dir(&refused).map_err(failed("made", &refused))?;
        limit(&refused, LEAST_MEMORY, limits.tasks.all)?;
        Ok(cgroups)
    }

    /// Returns whether users and tenants have shares of the processors.
    ///
    /// # Errors
    /// They have none, since the kernel gives this process's cgroup no controller for that.
    pub fn check_processors(&self) -> Result<(), CgroupError> {
        if self.controllers.contains(&PROCESSORS) {
            return Ok(());
        }
        let base = self.directory.parent().unwrap_or(&self.directory);
        Err(CgroupError::NoController {
            path: base.to_owned(),
            controller: PROCESSORS,
        })
    }

    fn refused(&self) -> PathBuf {
        self.directory.join(REFUSED)
    }

    /// Moves a process that refuses connections into the cgroup of these.
    ///
    /// # Errors
    /// The kernel does not move it.
    pub fn place_refuser(&self, process: libc::pid_t) -> Result<(), CgroupError> {
        enter(&self.refused(), process)
    }

    /// Makes the cgroup of an idle worker.
    ///
    /// # Errors
    /// Fails if the kernel does not make the cgroup, or does not accept its limits.
    pub(super) fn make(self: &Arc<Self>) -> Result<Cgroup, CgroupError> {
        self.make_in(Arc::clone(&self.spare))
    }

    /// Returns the controllers of the workers' cgroups.
    fn of_workers(&self) -> Vec<&'static str> {
        let controllers = self.controllers.iter().copied();
        let has = |name: &&str| *name != MEMORY || self.limits.by_worker;
        controllers.filter(has).collect()
    }

    /// Makes a cgroup with others below it, which have these controllers. `memory` and `tasks` limit all of them together.
    fn make_level(
        &self,
        path: &Path,
        (memory, tasks): (u64, u64),
        controllers: &[&str],
    ) -> Result<(), CgroupError> {
        fs::create_dir(path).map_err(failed("made", path))?;
        let limited = limit(path, memory, tasks).and_then(|()| enable(path, controllers));
        if limited.is_err() {
            let _ = fs::remove_dir(path);
        }
        limited
    }

    fn user_of(&self, tenant: u32) -> Option<PathBuf> {
        let user = self.users.lock().get(&tenant).copied();
        user.map(|user| self.directory.join(format!("{USER}{user}")))
    }

    fn tenants_path(&self, tenant: u32) -> PathBuf {
        let place = self.user_of(tenant);
        let place = place.unwrap_or_else(|| self.directory.clone());
        place.join(format!("{TENANT}{tenant}"))
    }

    /// Removes the cgroup of a tenant whose processes have ended, unless something of theirs is still charged to it, or
    /// the user's tenants have left too much. `ended` is the time since which none has run. Returns whether the cgroup is
    /// gone.
    pub fn remove_tenant(&self, tenant: u32, ended: Instant) -> bool {
        let tenants = self.tenants.lock();
        let level = tenants.get(&tenant);
        let is_left = level.is_none_or(|level| level.strong_count() == 0);
        let removed = is_left && self.is_removed(tenant, ended.elapsed() >= charge::SETTLED);
        if removed {
            self.users.lock().remove(&tenant);
        }
        removed
    }

    /// Removes a tenant's cgroup, unless something is charged to it, or its user's tenants have left too much. Returns
    /// whether it is gone.
    fn is_removed(&self, tenant: u32, is_settled: bool) -> bool {
        let path = self.tenants_path(tenant);
        // One that could not be removed when its process was reaped: some kernels let a process leave its cgroup later.
        for child in children(&path) {
            let _ = fs::remove_dir(child);
        }
        if !path.exists() {
            return true;
        }
        let most = self.limits.memory.user / LEFT;
        let user = self.user_of(tenant);
        let is_too_much = || user.is_some_and(|user| charge::left_behind(&user, &path) > most);
        !charge::has_pages(&path, is_settled) && !is_too_much() && fs::remove_dir(&path).is_ok()
    }

    /// Returns the level of a tenant. Its cgroup is removed by [`remove_tenant`](Self::remove_tenant).
    fn level_of(&self, tenant: u32) -> Result<Arc<Level>, CgroupError> {
        let mut tenants = self.tenants.lock();
        tenants.retain(|_, level| level.strong_count() > 0);
        if let Some(level) = tenants.get(&tenant).and_then(Weak::upgrade) {
            return Ok(level);
        }
        let Limits { memory, tasks, .. } = self.limits;
        if let Some(user) = self.user_of(tenant).filter(|user| !user.exists()) {
            self.make_level(&user, (memory.user, tasks.user), &self.controllers)?;
        }
        let path = self.tenants_path(tenant);
        // It may be there: charged with what an earlier process of the tenant has left.
        if !path.exists() {
            self.make_level(&path, (memory.tenant, tasks.tenant), &self.of_workers())?;
        }
        let level = Level::new(path, true);
        tenants.insert(tenant, Arc::downgrade(&level));
        Ok(level)
    }

    /// Moves the first process of a tenant of this user as [`place_for`](Self::place_for) does.
    ///
    /// # Errors
    /// The kernel makes no cgroup for it, or does not move it.
    pub fn place_first(
        &self,
        (user, tenant): (u32, u32),
        process: libc::pid_t,
    ) -> Result<Place, CgroupError> {
        self.users.lock().insert(tenant, user);
        self.place_for(tenant, process)
    }

    /// Moves a process that serves a tenant into a cgroup beside the tenant's workers. It comes
    /// before these where the tenant's share of the processors is short.
    ///
    /// # Errors
    /// The kernel makes no cgroup for it, or does not move it.
    pub fn place_for(&self, tenant: u32, process: libc::pid_t) -> Result<Place, CgroupError> {
        let level = self.level_of(tenant)?;
        let mut places = self.places.lock();
        places.retain(|_, place| place.strong_count() > 0);
        let place = match places.get(&tenant).and_then(Weak::upgrade) {
            Some(place) => place,
            None => {
                let path = level.path.join(LOOP);
                fs::create_dir(&path).map_err(failed("made", &path))?;
                let place = Level::new(path, false);
                if self.controllers.contains(&PROCESSORS) {
                    write(&place.path.join("cpu.weight"), FIRST_WEIGHT)?;
                }
                places.insert(tenant, Arc::downgrade(&place));
                place
            }
        };
        enter(&place.path, process)?;
        Ok(Place {
            _place: place,
            level,
        })
    }

    fn make_in(self: &Arc<Self>, level: Arc<Level>) -> Result<Cgroup, CgroupError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = level.path.join(number.to_string());
        fs::create_dir(&path).map_err(failed("made", &path))?;
        let handle = match File::open(&path) {
            Ok(handle) => handle,
            Err(error) => {
                let _ = fs::remove_dir(&path);
                return Err(failed("opened", &path)(error));
            }
        };
        let cgroup = Cgroup {
            path,
            handle,
            level,
            parent: Arc::clone(self),
        };
        let Limits { memory, tasks, .. } = self.limits;
        if self.limits.by_worker {
            limit(&cgroup.path, memory.worker, tasks.worker)?;
        } else {
            wormhole_cgroups::limit_tasks(&cgroup.path, tasks.worker)?;
        }
        Ok(cgroup)
    }
}

/// Limits the tasks and the memory of a cgroup, and forbids swap.
fn limit(path: &Path, memory: u64, tasks: u64) -> Result<(), CgroupError> {
    wormhole_cgroups::limit(path, memory, tasks)?;
    // A kernel without swap has no `memory.swap.max`.
    let swap = path.join("memory.swap.max");
    if swap.exists() {
        write(&swap, "0")?;
    }
    Ok(())
}

/// The cgroup of a tenant, or one in it, which is removed with this value, or that of idle workers. A tenant's has to keep what
/// is charged to it.
#[derive(Debug)]
struct Level {
    path: PathBuf,
    keeps_charge: bool,
    /// Processes that the OOM killer has ended and that were counted as such.
    counted: AtomicU64,
}

impl Level {
    fn new(path: PathBuf, keeps_charge: bool) -> Arc<Self> {
        Arc::new(Self {
            counted: AtomicU64::new(killed_for_memory(&path)),
            path,
            keeps_charge,
        })
    }

    /// Returns whether a process here that has ended by SIGKILL was ended by the OOM killer. Each that it has ended counts once.
    fn counts_one_more(&self) -> bool {
        let killed = killed_for_memory(&self.path);
        let one_more = |counted| (counted < killed).then_some(counted + 1);
        let counted = self
            .counted
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        counted.is_ok()
    }
}

/// Place of a process that serves a tenant. Its cgroup is removed with the last of these values,
/// which is to outlive the process.
#[derive(Debug)]
pub struct Place {
    // Removed in this order.
    _place: Arc<Level>,
    level: Arc<Level>,
}

impl Place {
    /// Returns whether the OOM killer has ended the process, which SIGKILL has ended.
    pub fn ran_out_of_memory(&self) -> bool {
        self.level.counts_one_more()
    }
}

impl Drop for Level {
    fn drop(&mut self) {
        if !self.keeps_charge {
            remove(&self.path);
        }
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        remove_tree(&self.directory);
    }
}

/// Cgroup of one worker. Dropping this value removes it, so it must outlive the worker.
#[derive(Debug)]
pub(super) struct Cgroup {
    path: PathBuf,
    handle: File,
    // Fields drop in this order, after the worker's cgroup: first the tenant's, then the supervisor's.
    level: Arc<Level>,
    parent: Arc<Cgroups>,
}

impl Cgroup {
    /// Moves a worker into a cgroup of its tenant's, for the rest of its life.
    ///
    /// # Errors
    /// Fails if the kernel does not make the cgroup, or does not move the process.
    pub fn move_to(&mut self, tenant: u32, process: libc::pid_t) -> Result<(), CgroupError> {
        let cgroup = self.parent.make_in(self.parent.level_of(tenant)?)?;
        match write(&cgroup.path.join("cgroup.procs"), &process.to_string()) {
            // ESRCH: the worker has ended, and is not reaped yet.
            Err(CgroupError::File { cause, .. }) if cause.raw_os_error() == Some(libc::ESRCH) => {}
            moved => {
                moved?;
                *self = cgroup;
            }
        }
        Ok(())
    }

    /// Returns whether the OOM killer has ended the worker, which SIGKILL has ended.
    pub fn ran_out_of_memory(&self) -> bool {
        self.level.counts_one_more()
    }
}

impl AsFd for Cgroup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.path) {
            tracing::warn!("{} is left behind: {error}", self.path.display());
        }
    }
}

/// Returns the processes that the OOM killer has ended in a cgroup and below it (`oom_kill` in `memory.events`).
fn killed_for_memory(cgroup: &Path) -> u64 {
    let events = read(&cgroup.join("memory.events")).unwrap_or_default();
    let count = |line: &str| line.strip_prefix("oom_kill ")?.parse().ok();
    events.lines().find_map(count).unwrap_or(0)
}

/// Moves a process, unless it has ended.
fn enter(cgroup: &Path, process: libc::pid_t) -> Result<(), CgroupError> {
    match write(&cgroup.join("cgroup.procs"), &process.to_string()) {
        Err(CgroupError::File { cause, .. }) if cause.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        moved => moved,
    }
}

/// Makes a fresh cgroup for this supervisor, and locks it.
fn own_directory(base: &Path) -> Result<(PathBuf, File), CgroupError> {
    let pid = std::process::id();
    for number in 0.. {
        // A supervisor in another PID namespace may have the same process number.
        let path = base.join(format!("{WORKERS}{pid}.{number}"));
        match fs::create_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            made => made.map_err(failed("made", &path))?,
        }
        // Another supervisor may have taken it for abandoned before it was locked.
        let Ok(lock) = File::open(&path) else {
            continue;
        };
        // LOCK_NB, since another holder of the lock may never release it.
        let locked = flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok();
        let is_there = fs::metadata(&path)
            .and_then(|there| Ok(there.ino() == lock.metadata()?.ino()))
            .unwrap_or(false);
        if locked && is_there {
            return Ok((path, lock));
        }
        let _ = fs::remove_dir(&path);
    }
    Err(CgroupError::Busy(base.to_owned()))
}

/// Removes the cgroups of supervisors that were killed, which hold no lock any more.
fn remove_abandoned(base: &Path) {
    for path in children(base) {
        let is_ours = path
            .file_name()
            .is_some_and(|name| name.as_bytes().starts_with(WORKERS.as_bytes()));
        let Some(lock) = is_ours.then(|| File::open(&path).ok()).flatten() else {
            continue;
        };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            tracing::debug!("{} was left behind", path.display());
            remove_tree(&path);
        }
    }
}

fn remove_tree(path: &Path) {
    for child in children(path) {
        // Kernels before 5.14 have no `cgroup.kill`; their workers end by PR_SET_PDEATHSIG.
        let _ = write(&child.join("cgroup.kill"), "1");
        wait_until_empty(&child, Some(&PATIENCE));
        remove_tree(&child);
    }
    remove(path);
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_dir(path) {
        tracing::warn!("{} is left behind: {error}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_divide_three_quarters_of_the_memory_if_nothing_else_is_said() {
        const GIB: u64 = 1 << 30;
        let shares = |worker, tenant, strangers| {
            let limit = memory_limit(64 * GIB, worker, tenant, strangers);
            [limit.worker, limit.tenant, limit.user, limit.all].map(|bytes| bytes / GIB)
        };
        assert_eq!(shares(None, None, (1, 1)), [48; 4], "one has all");
        assert_eq!(shares(None, None, (1, 4)), [12, 12, 48, 48]);
        assert_eq!(shares(None, None, (2, 2)), [12, 12, 24, 48]);
        assert_eq!(shares(Some(2 * GIB), None, (1, 4)), [2, 12, 48, 48]);
        assert_eq!(shares(Some(20 * GIB), None, (2, 2)), [20, 20, 40, 48]);
        assert_eq!(shares(None, Some(30 * GIB), (2, 2)), [30, 30, 48, 48]);
        assert_eq!(shares(None, Some(60 * GIB), (2, 2)), [60; 4]);
        let least = memory_limit(GIB, None, None, (1, 64));
        assert_eq!((least.worker, least.tenant), (LEAST_MEMORY, LEAST_MEMORY));
    }

    #[test]
    fn one_of_several_tenants_leaves_half_of_the_threads_to_others() {
        const WORKER: u64 = 300;
        let shares = |tenants, sessions| {
            let Limit { tenant, all, .. } = task_limit(32_768, tenants, (sessions, WORKER));
            (tenant, all)
        };
        assert_eq!(shares(1, 128), (24_576, 24_576), "one may have all");
        assert_eq!(shares(2, 128), (12_288, 24_576));
        assert_eq!(shares(64, 128), (12_288, 24_576));
        let needed = 2 * WORKER;
        assert_eq!(shares(1, 2), (needed, 24_576), "what its sessions need");
        assert_eq!(shares(64, 2), (needed, 24_576));
    }
}

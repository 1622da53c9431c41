//! Lists of system calls, and seccomp filters compiled from them.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule,
};

/// Errors of compiling and of installing a filter.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// The list cannot be compiled to a BPF program.
    #[error("the system call filter does not compile")]
    Compile(#[from] BackendError),
    /// The kernel lacks seccomp filters, or another thread has a filter that this one lacks.
    #[error("the kernel does not take the system call filter")]
    Install(#[from] seccompiler::Error),
}

/// Action for a call that is on no list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denial {
    /// The call fails with this error number.
    Fails(i32),
    /// The thread gets SIGSYS instead: see [`crate::report_denied_calls`].
    Signal,
}

/// Flags with which `pthread_create` calls `clone`. A thread without `CLONE_FILES` has a table of descriptors of its own,
/// with a limit of its own.
const THREAD_FLAGS: u64 = (libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM) as u64;
const NAMESPACE_FLAGS: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP) as u64;

/// Most descriptors that one call waits for. The kernel allocates some 64 bytes for each while the call waits, which no
/// cgroup counts.
const AWAITED: u64 = 256;

/// Rules on the arguments of system calls, by the call's number. A call is allowed if one of its rules holds. An empty
/// list allows any arguments.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// List of the system calls that a thread may make.
#[derive(Clone, Debug, Default)]
pub struct Calls {
    allowed: Rules,
    absent: Rules,
    idle: Rules,
}

impl Calls {
    /// Creates a list that allows these calls with any arguments.
    pub fn any(calls: &[i64]) -> Self {
        Self::default().and(calls)
    }

    /// Adds these calls, allowed with any arguments.
    #[must_use]
    pub fn and(mut self, calls: &[i64]) -> Self {
        for &call in calls {
            self.allowed.insert(call, Vec::new());
        }
        self
    }

    /// Adds this call, allowed if one of `rules` holds.
    #[must_use]
    pub fn and_where(mut self, call: i64, rules: Vec<SeccompRule>) -> Self {
        add(&mut self.allowed, call, rules);
        self
    }

    /// Adds a call that waits for as many descriptors as this argument says, for 256 at most.
    ///
    /// # Errors
    /// The argument's number is too large.
    pub fn and_waits(self, call: i64, argument: u8) -> Result<Self, FilterError> {
        Ok(self.and_where(call, vec![at_most(argument, AWAITED)?]))
    }

    /// Adds `madvise` with advice that takes a time in proportion to the range and concerns memory of the caller's alone. These are
    /// left out:
    /// - `MADV_MERGEABLE`: merged pages reveal those of other processes, and no cgroup counts the kernel's memory for them;
    /// - `MADV_HWPOISON` and its like: the system loses the pages;
    /// - `MADV_COLD`, `MADV_PAGEOUT` and `MADV_COLLAPSE`: other processes that have mapped the pages wait;
    /// - `MADV_WILLNEED` and `MADV_REMOVE`: each part of the range costs a walk through the file, or through all of its mappings.
    ///
    /// # Errors
    /// Never.
    pub fn and_advice(self) -> Result<Self, FilterError> {
        const ADVICE: [i32; 11] = [
            libc::MADV_DONTNEED,
            libc::MADV_DONTFORK,
            libc::MADV_DOFORK,
            libc::MADV_HUGEPAGE,
            libc::MADV_NOHUGEPAGE,
            libc::MADV_DONTDUMP,
            libc::MADV_DODUMP,
            libc::MADV_WIPEONFORK,
            libc::MADV_KEEPONFORK,
            libc::MADV_POPULATE_READ,
            libc::MADV_POPULATE_WRITE,
        ];
        let advice = ADVICE.map(|advice| u64::from(advice.unsigned_abs()));
        Ok(self.and_where(libc::SYS_madvise, equals_one_of(2, advice)?))
    }

    /// Adds the creation of threads of this process, in no new namespace.
    ///
    /// # Errors
    /// Never.
    pub fn and_threads(self) -> Result<Self, FilterError> {
        let flags = masked(0, THREAD_FLAGS | NAMESPACE_FLAGS, THREAD_FLAGS)?;
        // libc falls back from `clone3` to `clone`, whose flags a filter can read.
        Ok(self
            .and_where(libc::SYS_clone, vec![flags])
            .without(&[libc::SYS_clone3]))
    }

    /// Adds all calls of another list, allowed and absent ones.
    #[must_use]
    pub fn and_all(mut self, other: Self) -> Self {
        for (call, rules) in other.allowed {
            add(&mut self.allowed, call, rules);
        }
        for (call, rules) in other.absent {
            add(&mut self.absent, call, rules);
        }
        for (call, rules) in other.idle {
            add(&mut self.idle, call, rules);
        }
        self
    }

    /// Makes these calls fail with ENOSYS, for libraries that then use another call.
    #[must_use]
    pub fn without(mut self, calls: &[i64]) -> Self {
        for &call in calls {
            self.absent.insert(call, Vec::new());
        }
        self
    }

    /// Makes this call fail with ENOSYS if one of `rules` holds.
    #[must_use]
    pub fn without_where(mut self, call: i64, rules: Vec<SeccompRule>) -> Self {
        add(&mut self.absent, call, rules);
        self
    }

    /// This call returns 0 and does nothing, where one of `rules` holds.
    #[must_use]
    pub fn idle_where(mut self, call: i64, rules: Vec<SeccompRule>) -> Self {
        add(&mut self.idle, call, rules);
        self
    }

    /// Compiles the filter.
    ///
    /// # Errors
    /// The list is too long for the kernel, or empty.
    pub fn compile(mut self, denial: Denial) -> Result<Filter, FilterError> {
        let architecture = std::env::consts::ARCH.try_into()?;
        let mut programs = Vec::new();
        if !self.absent.is_empty() {
            for &call in self.absent.keys() {
                // The filter of absent calls answers them, so the list must not deny them.
                self.allowed.entry(call).or_default();
            }
            programs.push(answer(self.absent, libc::ENOSYS)?);
        }
        if !self.idle.is_empty() {
            for (call, rules) in &self.idle {
                add(&mut self.allowed, *call, rules.clone());
            }
            programs.push(answer(self.idle, 0)?);
        }
        let denied = match denial {
            Denial::Fails(error) => SeccompAction::Errno(error.unsigned_abs()),
            Denial::Signal => SeccompAction::Trap,
        };
        let allowed = SeccompFilter::new(self.allowed, denied, SeccompAction::Allow, architecture)?;
        // The list of allowed calls comes last, because it denies the installation of further filters.
        programs.push(allowed.try_into()?);
        Ok(Filter(programs))
    }
}

/// A filter that returns `error` from these calls without making them, and allows all others. An `error` of 0 is success.
fn answer(calls: Rules, error: i32) -> Result<BpfProgram, FilterError> {
    let architecture = std::env::consts::ARCH.try_into()?;
    let action = SeccompAction::Errno(error.unsigned_abs());
    let filter = SeccompFilter::new(calls, SeccompAction::Allow, action, architecture)?;
    Ok(filter.try_into()?)
}

/// Adds a call's rules to the existing ones. If either list of rules is empty, the call is allowed with any arguments.
fn add(to: &mut Rules, call: i64, rules: Vec<SeccompRule>) {
    match to.get_mut(&call) {
        Some(there) if there.is_empty() || rules.is_empty() => there.clear(),
        Some(there) => there.extend(rules),
        None => {
            to.insert(call, rules);
        }
    }
}

/// BPF programs of a seccomp filter, in the order of installation. A call is made only if all of them allow it.
#[derive(Clone, Debug)]
pub struct Filter(Vec<BpfProgram>);

impl Filter {
    /// Compiles a filter under which these calls fail with EPERM. It allows all others.
    ///
    /// # Errors
    /// The list is too long for the kernel, or empty.
    pub fn against(calls: &[i64]) -> Result<Self, FilterError> {
        let calls = calls.iter().map(|&call| (call, Vec::new())).collect();
        Ok(Self(vec![answer(calls, libc::EPERM)?]))
    }

    /// Restricts this thread, and those that it starts, to the calls of the list. Allocates nothing, so that a process
    /// may call it right after clone(2). Sets no_new_privs.
    ///
    /// # Errors
    /// The kernel lacks seccomp filters.
    pub fn install(&self) -> Result<(), FilterError> {
        for program in &self.0 {
            seccompiler::apply_filter(program)?;
        }
        Ok(())
    }

    /// Restricts all threads of this process to the calls of the list.
    ///
    /// # Errors
    /// The kernel lacks seccomp filters, or a thread has a filter that this thread lacks.
    pub fn install_on_all_threads(&self) -> Result<(), FilterError> {
        for program in &self.0 {
            seccompiler::apply_filter_all_threads(program)?;
        }
        Ok(())
    }
}

/// Creates a rule that the argument's lower half equals `value`.
///
/// # Errors
/// The argument's number is too large.
pub fn equals(argument: u8, value: u64) -> Result<SeccompRule, FilterError> {
    all_equal(&[(argument, value)])
}

/// Creates one rule for each value: the lower half of the argument equals it. A call that has all of them is allowed with each
/// value.
///
/// # Errors
/// The argument's number is too large.
pub fn equals_one_of(
    argument: u8,
    values: impl IntoIterator<Item = u64>,
) -> Result<Vec<SeccompRule>, FilterError> {
    let rules = values.into_iter().map(|value| equals(argument, value));
    rules.collect()
}

/// Creates a rule that the lower half of each of these arguments equals the value beside it.
///
/// # Errors
/// The argument's number is too large.
pub fn all_equal(arguments: &[(u8, u64)]) -> Result<SeccompRule, FilterError> {
    let conditions = arguments
        .iter()
        .map(|&(argument, value)| {
            SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
        })
        .collect::<Result<_, _>>()?;
    Ok(SeccompRule::new(conditions)?)
}

/// Creates a rule that the argument, masked with `bits`, equals `value`.
///
/// # Errors
/// The argument's number is too large.
pub fn masked(argument: u8, bits: u64, value: u64) -> Result<SeccompRule, FilterError> {
    all_masked(&[(argument, bits, value)])
}

/// Creates a rule that each of these arguments, masked with the bits beside it, equals the value.
///
/// # Errors
/// The argument's number is too large.
pub fn all_masked(arguments: &[(u8, u64, u64)]) -> Result<SeccompRule, FilterError> {
    let conditions = arguments
        .iter()
        .map(|&(argument, bits, value)| {
            let kind = SeccompCmpOp::MaskedEq(bits);
            SeccompCondition::new(argument, SeccompCmpArgLen::Qword, kind, value)
        })
        .collect::<Result<_, _>>()?;
    Ok(SeccompRule::new(conditions)?)
}

/// Creates a rule that the argument's lower half has no bits set beside those of `bits`.
///
/// # Errors
/// The argument's number is too large.
pub fn within(argument: u8, bits: u64) -> Result<SeccompRule, FilterError> {
    masked(argument, !bits & u64::from(u32::MAX), 0)
}

/// Creates a rule that the argument's lower half is at most `value`.
///
/// # Errors
/// The argument's number is too large.
pub fn at_most(argument: u8, value: u64) -> Result<SeccompRule, FilterError> {
    rule(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Le, value)
}

fn rule(
    argument: u8,
    length: SeccompCmpArgLen,
    kind: SeccompCmpOp,
    value: u64,
) -> Result<SeccompRule, FilterError> {
    let condition = SeccompCondition::new(argument, length, kind, value)?;
    Ok(SeccompRule::new(vec![condition])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_share_their_descriptors() {
        let others: Vec<i64> = (0..400)
            .filter(|call| ![libc::SYS_clone, libc::SYS_clone3].contains(call))
            .collect();
        let calls = Calls::any(&others).and_threads().unwrap();
        let filter = calls.compile(Denial::Fails(libc::EPERM)).unwrap();
        let confined = std::thread::spawn(move || {
            filter.install().unwrap();
            std::thread::spawn(|| ()).join().unwrap();
            let own_table = THREAD_FLAGS & !u64::from(libc::CLONE_FILES.unsigned_abs());
            // SAFETY: the filter refuses the call.
            let made = unsafe { libc::syscall(libc::SYS_clone, own_table, 0, 0, 0, 0) };
            (made, std::io::Error::last_os_error().raw_os_error())
        });
        assert_eq!(confined.join().unwrap(), (-1, Some(libc::EPERM)));
    }

    #[test]
    fn a_filter_against_calls_allows_all_others() {
        let confined = std::thread::spawn(|| {
            let calls = [libc::SYS_getppid, libc::SYS_seccomp];
            Filter::against(&calls).unwrap().install().unwrap();
            // SAFETY: these calls take no arguments.
            let results =
                [libc::SYS_getppid, libc::SYS_getpid].map(|call| unsafe { libc::syscall(call) });
            (results, Filter::against(&calls).unwrap().install())
        });
        let ([parent, own], again) = confined.join().unwrap();
        assert_eq!((parent, own), (-1, std::process::id().into()));
        again.unwrap_err();
    }

    #[test]
    fn a_call_that_one_list_has_with_any_arguments_stays_so() {
        let some = || Calls::default().and_where(1, vec![equals(0, 7).unwrap()]);
        for both in [
            some().and_all(Calls::any(&[1])),
            Calls::any(&[1]).and_all(some()),
        ] {
            assert!(both.allowed[&1].is_empty());
        }
        assert_eq!(some().and_all(some()).allowed[&1].len(), 2);
    }

    #[test]
    fn a_filter_without_absent_calls_is_one_program() {
        let programs = |calls: Calls| calls.compile(Denial::Signal).unwrap().0.len();
        assert_eq!(programs(Calls::any(&[1])), 1);
        assert_eq!(programs(Calls::any(&[1]).without(&[2])), 2);
    }
}

//! Memory that stays charged to a cgroup after its last process has ended.
//!
//! The kernel charges a page to the cgroup that touched it first, until the page is free. Another process may keep it: a
//! launcher that holds its window open, or a guest that holds its session's file. A cgroup without a process that is
//! removed takes such a charge out of its limit, and its owner could begin anew with a whole one.
//!
//! Pages of files on a disk are charged as well, and stay in the page cache when no process uses them. The kernel
//! frees them when memory is short, so they do not count here. The kernel's own memory counts where it does not free it by
//! itself: unread messages in sockets, which a launcher can keep, are charged to the process that sent them.
//!
//! The kernel counts late and in advance, so a cgroup may keep a little ([`has_pages`]). When it is removed, that stays
//! charged to the cgroup above it, which belongs to the tenant's user ([`left_behind`]).

use std::path::Path;
use std::sync::LazyLock;
use std::time::Duration;
use std::{fs, io};

/// Time after which `memory.stat` includes all that came before (Linux, `FLUSH_TIME`: 2 s).
pub const SETTLED: Duration = Duration::from_millis(2500);
/// Bytes that each processor may hold in advance for a cgroup: 64 pages (Linux, `MEMCG_CHARGE_BATCH`).
const IN_ADVANCE: u64 = 64 * 4096;
/// Bytes of the kernel's own memory that stay charged to a cgroup which nobody keeps.
const KERNEL_REST: u64 = 1 << 20;
/// Kinds of the kernel's own memory in `memory.stat`, for kernels before 5.18, which do not state the sum.
const KERNEL: [&str; 5] = ["slab", "percpu", "kernel_stack", "pagetables", "vmalloc"];

/// Returns whether a cgroup without processes, or one below it that was removed, still has pages that are not free. Soon
/// after its last process has ended (not `is_settled`) it may return true although they are free.
///
/// A file that cannot be read counts as pages, unless the cgroup has none of its name.
pub fn has_pages(cgroup: &Path, is_settled: bool) -> bool {
    let read = |file| match fs::read_to_string(cgroup.join(file)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => None,
        text => Some(text.unwrap_or_default()),
    };
    let (Some(tree), Some(current), Some(stat)) = (
        read("cgroup.stat"),
        read("memory.current"),
        read("memory.stat"),
    ) else {
        return true;
    };
    // A removed cgroup is there until nothing is charged to it. This count is exact at any time.
    let is_empty = number(&tree, "nr_dying_descendants") == Some(0);
    let current = current.trim().parse().unwrap_or(0);
    let slack = IN_ADVANCE * (*PROCESSORS + 1);
    (!is_empty && !is_settled) || holds(&stat, current, slack)
}

/// Returns the bytes in use that are charged to a cgroup and to none that is below it: those of cgroups that were removed,
/// and those of `leaving`, which is to be removed.
pub fn left_behind(cgroup: &Path, leaving: &Path) -> u64 {
    let entries = fs::read_dir(cgroup).into_iter().flatten().flatten();
    let others = entries.map(|entry| entry.path());
    let others = others.filter(|path| path.is_dir() && path != leaving);
    // One that grows meanwhile does not count as left.
    let whole = in_use(cgroup);
    whole.saturating_sub(others.map(|path| in_use(&path)).sum())
}

/// Returns the bytes charged to a cgroup that the kernel does not free by itself when memory is short.
fn in_use(cgroup: &Path) -> u64 {
    let read = |file| fs::read_to_string(cgroup.join(file)).unwrap_or_default();
    let current: u64 = read("memory.current").trim().parse().unwrap_or(0);
    let stat = read("memory.stat");
    let of = |name| number(&stat, name).unwrap_or(0);
    let cached = of("file").saturating_sub(of("shmem"));
    current.saturating_sub(cached + of("slab_reclaimable") + of("percpu"))
}

/// Number of processors that this machine can have, whatever share of them this process has.
static PROCESSORS: LazyLock<u64> = LazyLock::new(|| {
    let text = fs::read_to_string("/sys/devices/system/cpu/possible").unwrap_or_default();
    let last = text.trim().rsplit([',', '-']).next();
    last.and_then(|last| last.parse::<u64>().ok()).unwrap_or(0) + 1
});

fn number(stat: &str, name: &str) -> Option<u64> {
    let mut lines = stat.lines().filter_map(|line| line.split_once(' '));
    let (_, value) = lines.find(|(of, _)| *of == name)?;
    value.trim().parse().ok()
}

fn holds(stat: &str, current: u64, slack: u64) -> bool {
    let sum = |names: &[&str]| {
        let numbers = names.iter().filter_map(|name| number(stat, name));
        numbers.sum::<u64>()
    };
    if sum(&["anon", "shmem"]) > 0 {
        return true;
    }
    let kernel = number(stat, "kernel").unwrap_or_else(|| sum(&KERNEL));
    if kernel.saturating_sub(sum(&["slab_reclaimable", "percpu"])) > KERNEL_REST {
        return true;
    }
    // Pages of a file that is gone, which something has pinned, are in no line but in the sum.
    let freed_when_short = sum(&["file"]);
    current.saturating_sub(freed_when_short + kernel) > slack
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_page_that_is_kept_counts_and_what_the_kernel_frees_does_not() {
        let cached = "anon 0\nfile 8192\nkernel 4096\nshmem 0\nunevictable 8192\n";
        assert!(!holds(cached, 12_288, 0));
        assert!(holds("anon 0\nfile 4096\nshmem 4096\n", 4096, 8192));
        assert!(holds("anon 4096\nshmem 0\n", 4096, 8192));
        assert!(!holds("", 0, 0));
    }

    #[test]
    fn pinned_pages_of_a_file_that_is_gone_count() {
        let stat = "anon 0\nfile 4096\nshmem 0\nslab 4096\npercpu 4096\n";
        assert!(!holds(stat, 12_288 + 8192, 8192));
        assert!(holds(stat, 12_288 + 8193, 8192));
    }

    #[test]
    fn unread_messages_count_and_caches_of_the_kernel_do_not() {
        let cached = "file 0\nkernel 9437184\nslab_reclaimable 8388608\npercpu 65536\n";
        assert!(!holds(cached, 9_437_184, 0));
        assert!(holds(
            "file 0\nkernel 9437184\npercpu 65536\n",
            9_437_184,
            0
        ));
    }

    #[test]
    fn what_removed_cgroups_left_is_what_those_that_are_there_do_not_have() {
        let user = tempfile::tempdir().unwrap();
        let write = |path: &Path, current: u64, stat: &str| {
            fs::write(path.join("memory.current"), format!("{current}\n")).unwrap();
            fs::write(path.join("memory.stat"), stat).unwrap();
        };
        let cached = "anon 4096\nfile 12288\nshmem 4096\nslab_reclaimable 8192\npercpu 4096\n";
        write(user.path(), 100_000, cached);
        let [there, leaving] = ["there", "leaving"].map(|name| user.path().join(name));
        for (path, current) in [(&there, 30_000), (&leaving, 20_000)] {
            fs::create_dir(path).unwrap();
            write(path, current, "file 1000\n");
        }
        assert_eq!(
            left_behind(user.path(), &leaving),
            100_000 - 20_480 - 29_000
        );
        write(&there, 200_000, "");
        assert_eq!(left_behind(user.path(), &leaving), 0);
    }

    #[test]
    fn a_cgroup_without_files_of_memory_holds_none_and_one_that_cannot_be_read_does() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!has_pages(folder.path(), true));
        fs::create_dir(folder.path().join("memory.stat")).unwrap();
        assert!(has_pages(folder.path(), true));
    }
}

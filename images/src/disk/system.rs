//! Configuration of the system on a disk.

/// Label of the root file system.
pub const LABEL: &str = "wormhole";

/// Files of packages that a guest does without.
pub const LEFT_OUT: [&str; 3] = [
    "/usr/share/doc/*",
    "/usr/share/locale/*",
    "/usr/share/man/*",
];

/// Hook before the installation, with the root folder as its first argument: the initrd has only the disk's drivers.
pub const INITRAMFS: &str = r#"
mkdir -p "$1/etc/initramfs-tools/conf.d"
echo MODULES=list >"$1/etc/initramfs-tools/conf.d/wormhole"
printf 'virtio_pci\nvirtio_blk\next4\n' >"$1/etc/initramfs-tools/modules"
"#;

/// Installs the package for guests and configures the system: a shell script whose first argument is the root folder.
pub const SCRIPT: &str = include_str!("system.sh");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disk_is_mounted_by_its_label() {
        assert!(SCRIPT.contains(&format!("LABEL={LABEL} / ext4")));
    }
}

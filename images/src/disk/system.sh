set -eu
root=$1

chroot "$root" dpkg --install /tmp/wormhole-guest.deb
rm "$root/tmp/wormhole-guest.deb"

echo guest >"$root/etc/hostname"
printf '127.0.0.1 localhost\n127.0.1.1 guest\n::1 localhost\n' >"$root/etc/hosts"
echo 'LABEL=wormhole / ext4 defaults,discard 0 1' >"$root/etc/fstab"
# Each guest gets an identity of its own when it boots first.
: >"$root/etc/machine-id"
rm -f "$root/var/lib/dbus/machine-id"

# The console belongs to the host, which can read the disk as well: its users have no password.
chroot "$root" useradd --create-home --shell /bin/bash --groups wormhole user
chroot "$root" passwd --quiet --delete user
chroot "$root" passwd --quiet --delete root
# A login alone is without a password: by su any process of the guest would become root.
pam="$root/etc/pam.d"
sed -i 's/\(pam_unix\.so.*\) nullok/\1/' "$pam/common-auth"
own='auth\t[success=1 default=ignore]\tpam_unix.so nullok\nauth\trequisite\tpam_deny.so\nauth\trequired\tpam_permit.so'
sed -i "s/^@include common-auth\$/$own/" "$pam/login"
if grep -q nullok "$pam/common-auth" || ! grep -q nullok "$pam/login"; then
    echo "Debian has other rules for logins in /etc/pam.d than expected" >&2
    exit 1
fi

# An address on the kernel's command line (ip=) goes first; otherwise the network is asked for one.
cat >"$root/etc/systemd/network/90-wormhole.network" <<'EOF'
[Match]
Type=ether

[Network]
DHCP=yes
EOF
chroot "$root" systemctl --quiet enable systemd-networkd systemd-network-generator systemd-resolved
# A network that is slow to answer does not delay logins.
chroot "$root" systemctl --quiet disable systemd-networkd-wait-online

# There is no screen, and a guest that is seldom up has no use for tasks at night.
chroot "$root" systemctl --quiet mask getty@tty1.service getty-static.service systemd-pstore.service
for timer in apt-daily apt-daily-upgrade dpkg-db-backup e2scrub_all fstrim; do
    chroot "$root" systemctl --quiet disable "$timer.timer" || true
done
chroot "$root" systemctl --quiet mask e2scrub_reap.service

# Packages that are installed later have their documentation.
rm -f "$root/etc/dpkg/dpkg.cfg.d/99mmdebstrap"

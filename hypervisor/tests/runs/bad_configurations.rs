//! Gives every command wrong options, by flags and by files. Each is refused before anything starts: one sentence, exit
//! status 2, and nothing left.

use std::fs;
use std::path::Path;

use crate::harness::{alone, finish, nothing_is_left, wormhole};

/// Flags, in the order of the commands. `''` is an empty argument.
const FLAGS: &[(&str, &str)] = &[
    ("--frob", "'--frob'"),
    ("frob", "'frob'"),
    ("run", "<COMMAND>"),
    ("run --", "<COMMAND>"),
    ("run -x true", "'-x'"),
    (
        "run --placement cloud true",
        "[possible values: process, host, vm]",
    ),
    (
        "run --placement true",
        "[possible values: process, host, vm]",
    ),
    ("run --placement", "--placement"),
    ("run --device '' true", "is no device"),
    ("run --device cpu:0 true", "\"cpu:0\" is no device"),
    ("run --device cpu:17 true", "16 at most"),
    ("run --device cpu,frob true", "\"cpu,frob\" is no device"),
    ("run --device cuda: true", "\"cuda:\" is no device"),
    (
        "run --device cuda:0,cpu true",
        "\"cuda:0,cpu\" is no device",
    ),
    (
        "run --device cuda:0,cuda:0 true",
        "\"cuda:0,cuda:0\" is no device",
    ),
    (
        "run --device cpu --device cpu true",
        "cannot be used multiple times",
    ),
    (
        "run --host xen true",
        "[possible values: auto, kvm, emulated]",
    ),
    ("run --kernel '' true", "[possible values: 6.1, 6.12]"),
    ("run --window 0 true", "write a size with its unit"),
    ("run --window 3M true", "a multiple of 2 MiB"),
    ("run --window 8T true", "at most 4T"),
    (
        "run --window 99999999999999999999G true",
        "write a size with its unit",
    ),
    ("run --memory=-1M true", "write a size with its unit"),
    ("run --memory 1.5G true", "write a size with its unit"),
    ("run --cpus 256 true", "256 is not in 1..=64"),
    ("run --cpus two true", "'--cpus <CPUS>'"),
    ("run --cpus -1 true", "'-1'"),
    ("run --timeout 1h true", "'--timeout <TIMEOUT>'"),
    ("run --grace x true", "'--grace <GRACE>'"),
    ("run --env '' true", "a variable needs a name"),
    ("run --rootfs '' true", "'--rootfs <FOLDER>'"),
    (
        "run --rootfs relative true",
        "cannot show relative to a guest",
    ),
    (
        "run --workdir /no/folder true",
        "the guest has no such folder",
    ),
    (
        "run --rootfs / --workdir /etc/passwd true",
        "the guest has no such folder",
    ),
    ("run --rootfs / --workdir '' true", "'--workdir <FOLDER>'"),
    (
        "run --placement process --workdir / true",
        "--workdir applies to guests",
    ),
    (
        "run --hostname under_score true",
        "write at most 64 letters, digits, hyphens and dots",
    ),
    ("run --hostname=-x true", "'--hostname <NAME>'"),
    ("run --hostname a..b true", "such as node-1.example"),
    ("run --tty true", "--tty needs a terminal as standard input"),
    ("run --volume /a true", "SOURCE:DESTINATION, or"),
    ("run --volume /etc:/data:rw true", "must be a path below /"),
    ("run --volume /data:ro true", "SOURCE:DESTINATION:ro"),
    ("run --volume /etc:data:ro true", "must be a path below /"),
    ("run --volume /etc:/:ro true", "must be a path below /"),
    ("run --volume /etc:/a/../b:ro true", "without . and .."),
    ("run --volume /etc:/proc/x:ro true", "are the guest's own"),
    (
        "run --volume /no/folder:/data:ro true",
        "cannot show /no/folder to a guest",
    ),
    ("run --volume /etc/passwd:/data:ro true", "it is no folder"),
    (
        "run --volume /etc:/d:ro --volume /usr:/d/:ro true",
        "two volumes have the place /d",
    ),
    ("run --collect '' true", "write GUEST or GUEST:HOST"),
    ("run --collect tmp/out true", "is a path below /"),
    ("run --collect / true", "is a path below /"),
    ("run --collect /tmp/../out true", "without . and .."),
    ("run --collect :out true", "write GUEST or GUEST:HOST"),
    ("run --collect /out: true", "needs a name of its own"),
    ("run --collect /out:in/.. true", "needs a name of its own"),
    (
        "run --collect /out:no/folder/out true",
        "cannot collect files in no/folder/out: No such file",
    ),
    (
        "run --collect /a/out --collect /b/out true",
        "--collect and another option write out",
    ),
    (
        "run --collect /out:./a --json a true",
        "--collect and another option write a",
    ),
    ("run --collect /out:. true", "needs a name of its own"),
    (
        "run --collect /out:/etc true",
        "--collect would overwrite /etc",
    ),
    (
        "run --collect /0 --collect /1 --collect /2 --collect /3 --collect /4 --collect /5 --collect /6 --collect /7 \
         --collect /8 true",
        "at most 8 are possible",
    ),
    (
        "run --placement process --collect /out true",
        "--collect applies to guests",
    ),
    ("run --disk '' true", "a disk needs a file"),
    ("run --disk :ro true", "a disk needs a file"),
    ("run --disk /no/disk:ro true", "/no/disk cannot be opened"),
    ("run --network '' true", "address is missing"),
    (
        "run --network passt,address=10.0.0.2/24 true",
        "leave \"address=10.0.0.2/24\" out",
    ),
    ("run --network passt,mac=1 true", "has six bytes"),
    (
        "run --network passt,passt true",
        "passt, and mac=, can be there once",
    ),
    (
        "run --network passt --network passt true",
        "names passt twice",
    ),
    (
        "run --network tap=a,address=10.0.0.2/24,frob=1 true",
        "\"frob=1\" is no field of a network",
    ),
    (
        "run --network tap=a,address=10.0.0.2/24,dns=1.1.1.1,dns=1.1.1.1 true",
        "the field dns is there twice",
    ),
    ("run --json '' true", "'--json <JSON>'"),
    (
        "run --json a --json b true",
        "cannot be used multiple times",
    ),
    ("run --quiet=yes true", "'yes'"),
    ("run --quiet --quiet true", "cannot be used multiple times"),
    ("run --backend '' true", "a name has 1 to 32 letters"),
    (
        "run --placement process --backend none true",
        "no backend none is running",
    ),
    ("run --config", "'--config <FILE>'"),
    ("run --config '' true", "'--config <FILE>'"),
    (
        "run --config none true",
        "cannot read the configuration none: No such file",
    ),
    (
        "run --config . true",
        "cannot read the configuration .: it is no regular file",
    ),
    ("run --config /dev/zero true", "it is no regular file"),
    (
        "run --config none --config none true",
        "cannot be used multiple times",
    ),
    ("backend", "[subcommands: start, stop, list, help]"),
    ("backend frob", "'frob'"),
    ("backend start a b", "'b'"),
    ("backend start ''", "a name has 1 to 32 letters"),
    ("backend start --device cpu:0", "\"cpu:0\" is no device"),
    ("backend start --sessions 0", "'--sessions <N>'"),
    (
        "backend start --sessions-per-user 0",
        "'--sessions-per-user <N>'",
    ),
    (
        "backend start --tenants-per-user 0",
        "'--tenants-per-user <N>'",
    ),
    (
        "backend start --worker-memory 4g",
        "write a size such as 4G",
    ),
    ("backend start --tenant-memory 0", "write a size such as 4G"),
    (
        "backend start --window-limit 99999999T",
        "write a size such as 4G",
    ),
    (
        "backend start --tenant-user 4294967295",
        "'--tenant-user <UID>'",
    ),
    (
        "backend start --worker-memory 2G --tenant-memory 1G",
        "--worker-memory has no effect, since --tenant-memory allows less",
    ),
    (
        "backend start --sessions 2 --sessions-per-user 1",
        "--sessions has no effect, since --sessions-per-user allows less",
    ),
    (
        "backend start --trusted-tenants --trusted-tenants",
        "multiple times",
    ),
    ("backend start --foreground=1", "'1'"),
    (
        "backend start --config none",
        "cannot read the configuration none",
    ),
    ("attach", "--window <PATH>"),
    ("attach --window w", "--vsock <PATH>"),
    ("attach --vsock v", "--window <PATH>"),
    ("attach --window '' --vsock v", "'--window <PATH>'"),
    ("attach --window w --vsock v w", "'w'"),
    (
        "attach --window w --vsock v --size 258",
        "write a size with its unit",
    ),
    ("attach --window w --vsock v --cid 2", "'--cid <NUMBER>'"),
    ("attach --window w --serial ''", "'--serial <PATH>'"),
    (
        "attach --window w --serial s --vsock v",
        "'--serial <PATH>' cannot be used with '--vsock <PATH>'",
    ),
    (
        "attach --window w --serial s --cid 4",
        "'--serial <PATH>' cannot be used with '--cid <NUMBER>'",
    ),
    (
        "attach --window w --serial s",
        "no backend default is running",
    ),
    (
        "attach --window w --vsock v --backend ''",
        "a name has 1 to 32 letters",
    ),
    (
        "attach --window w --vsock v",
        "no backend default is running",
    ),
    (
        "attach --window w --vsock v --config none",
        "cannot read the configuration none: No such file",
    ),
    ("detach", "--vsock <PATH>"),
    ("detach v", "'v'"),
    (
        "detach --serial s",
        "no guest is attached at s: name the socket",
    ),
    (
        "detach --serial s --vsock v",
        "'--serial <PATH>' cannot be used with '--vsock <PATH>'",
    ),
    ("detach --vsock ''", "'--vsock <PATH>'"),
    (
        "detach --vsock v",
        "no guest is attached at v: name the socket",
    ),
    (
        "detach --vsock /etc/passwd",
        "no guest is attached at /etc/passwd: name the socket",
    ),
    ("backend start --slots 2", "--slots"),
    ("backend start --placement vm --slots 0", "'--slots <N>'"),
    ("backend start --placement vm --slots 65", "'--slots <N>'"),
    (
        "backend start --placement vm --slot-size 3M",
        "3145728 bytes",
    ),
    (
        "backend start --placement vm --pci 1f.7",
        "neither the address of a PCI device",
    ),
    (
        "backend start --placement vm --device cuda:0",
        "--device cuda:0 needs a GPU that the backend VM has for itself: name it with --pci",
    ),
    (
        "backend start --placement vm --device cuda:0 --pci 0000:00:1f.7",
        "--device cuda:0 in a backend VM serves one guest at a time: add --slots 1",
    ),
    (
        "backend start --placement vm --slots 1 --device cuda:0 --pci 0000:00:1f.7",
        "backend-6.1 does not have: add it with `wormhole image build backend --driver FILE`",
    ),
    (
        "run --placement vm --device cuda:1 true",
        "that of a single run has none",
    ),
    (
        "image build backend --driver /etc/passwd",
        "/etc/passwd is not NVIDIA's driver",
    ),
    (
        "image build backend --driver /no/such.run",
        "cannot read the driver /no/such.run: No such file",
    ),
    (
        "image build backend --driver /dev/zero",
        "is not NVIDIA's driver",
    ),
    (
        "image build backend --kernel 6.12 --driver debian",
        "backend VMs boot kernel 6.1, so that a driver for another one would not be used",
    ),
    ("image build guest --driver debian", "'--driver'"),
    ("image list --kernel 6.1", "'--kernel'"),
    ("backend stop a b", "'b'"),
    ("backend stop --config none", "'--config'"),
    ("backend list --json=1", "'1'"),
    (
        "guest",
        "[subcommands: start, stop, list, console, snapshot, logs, help]",
    ),
    ("guest start", "<NAME>"),
    ("guest start a", "--kernel <FILE>"),
    ("guest start a --foreground", "--kernel <FILE>"),
    (
        "guest start a --kernel /no/kernel",
        "cannot read /no/kernel",
    ),
    ("guest start a --foreground=1 --kernel k", "'1'"),
    (
        "guest start a --kernel k --backend unix:",
        "unix: needs the path of a socket",
    ),
    ("guest stop", "<NAME>"),
    ("guest stop ../a", "has 1 to 32 letters"),
    ("guest stop a", "no guest a is running"),
    ("guest stop a --timeout 1m", "'--timeout <TIMEOUT>'"),
    ("guest stop a --timeout=-1", "'--timeout <TIMEOUT>'"),
    ("guest stop a b", "'b'"),
    ("guest list a", "'a'"),
    ("guest list --json=1", "'1'"),
    ("ps a", "'a'"),
    ("ps --json=1", "'1'"),
    ("stats a b", "'b'"),
    ("stats a", "no backend a is running"),
    ("stats ../a", "has 1 to 32 letters"),
    ("stats unix:", "unix: needs the path of a socket"),
    (
        "stats unix:/no/socket",
        "no backend is there: nothing listens on /no/socket",
    ),
    ("stats --interval 0", "'--interval <SECONDS>'"),
    ("stats --interval 1s", "'--interval <SECONDS>'"),
    ("stats --once --interval 2", "'--interval <SECONDS>'"),
    ("stats --json --interval 2", "'--interval <SECONDS>'"),
    ("guest console", "<NAME>"),
    ("guest console a", "no guest a is running"),
    ("guest console /a", "has 1 to 32 letters"),
    ("guest snapshot", "<NAME>"),
    ("guest snapshot a", "<FOLDER>"),
    ("guest snapshot a f", "no guest a is running"),
    ("guest snapshot ../a f", "has 1 to 32 letters"),
    ("guest snapshot a f --stop=1", "'1'"),
    (
        "guest start a --foreground --restore /no/folder",
        "cannot read /no/folder",
    ),
    (
        "guest start a --foreground --restore /etc --append quiet",
        "cannot be used with",
    ),
    ("guest logs", "<NAME>"),
    ("guest logs a", "no guest a is running"),
    ("guest logs a --follow", "'--follow'"),
    (
        "guest start .. --foreground --kernel k",
        "has 1 to 32 letters",
    ),
    (
        "guest start a --foreground --kernel /no/kernel",
        "cannot read /no/kernel",
    ),
    (
        "guest start a --foreground --kernel /dev/zero",
        "cannot boot /dev/zero: it is no regular file",
    ),
    (
        "guest start a --foreground --kernel /etc/passwd --initrd /etc",
        "cannot boot /etc: it is no regular file",
    ),
    (
        "guest start a --foreground --kernel k --memory 1M",
        "at least 128M",
    ),
    (
        "guest start a --foreground --kernel k --window 3M",
        "a multiple of 2 MiB",
    ),
    (
        "guest start a --foreground --kernel k --network tap=a,address=10.0.0.2/24",
        "is neither tap=NAME, passt nor mac=MAC",
    ),
    (
        "guest start a --foreground --kernel k --network tap=a --network tap=a",
        "the tap interface a twice",
    ),
    (
        "guest start a --foreground --kernel k --network passt,dns=9.9.9.9",
        "is neither tap=NAME, passt nor mac=MAC",
    ),
    (
        "guest start a --foreground --kernel k --device cpu --backend b",
        "cannot be used with",
    ),
    ("image", "[subcommands: build, list, help]"),
    (
        "image build",
        "[subcommands: guest, backend, emulated-host, help]",
    ),
    ("image build frob", "'frob'"),
    ("image build guest frob", "'frob'"),
    (
        "image build guest --kernel 5.4",
        "[possible values: 6.1, 6.12]",
    ),
    ("image build guest --folder ''", "'--folder <FOLDER>'"),
    (
        "image build guest --folder /proc/none",
        "cannot make /proc/none",
    ),
    (
        "image build emulated-host --folder /etc/passwd",
        "cannot make /etc/passwd",
    ),
    ("image build emulated-host --rebuild=1", "'1'"),
];

/// Files for `wormhole run --config c.toml`.
const RUN_FILES: &[(&str, &str)] = &[
    ("", "<COMMAND>"),
    ("command = []", "<COMMAND>"),
    ("command = \"true\"", "line 1: `command` must be an array"),
    ("memory", "line 1: not valid TOML"),
    ("memory = 1G", "line 1: not valid TOML"),
    (
        "quiet = true\ncpus = 1\nquiet = true",
        "line 3: not valid TOML: duplicate key",
    ),
    (
        "memroy = \"1G\"",
        "line 1: unknown key `memroy`; did you mean `memory`?",
    ),
    (
        "\n\nfrob = 1",
        "line 3: unknown key `frob`; there are placement, transport, device, ",
    ),
    ("help = true", "unknown key `help`"),
    ("config = \"c.toml\"", "unknown key `config`"),
    ("argv0 = \"x\"", "unknown key `argv0`"),
    ("[run]\nmemory = \"1G\"", "unknown key `run`"),
    ("\"memory=1G\" = 1", "unknown key `memory=1G`"),
    ("\"\" = 1", "unknown key ``"),
    (
        "memory = { size = 1 }",
        "`memory` must be a string or a number, not a table",
    ),
    (
        "memory = [\"1G\"]",
        "`memory` must be a string or a number, not an array",
    ),
    (
        "memory = true",
        "`memory` must be a string or a number, not a boolean",
    ),
    (
        "memory = 1073741824",
        "line 1: invalid value '1073741824' for '--memory",
    ),
    (
        "\nmemory = \"1M\"",
        "a guest cannot have 1048576 bytes of memory",
    ),
    ("\nmemory = \"1M\"", "(c.toml has `memory` in line 2)"),
    ("window = \"3M\"", "(c.toml has `window` in line 1)"),
    (
        "cpus = -1",
        "line 1: invalid value '-1' for '--cpus <CPUS>'",
    ),
    ("cpus = 0x100", "256 is not in 1..=64"),
    ("cpus = 1.5", "invalid value '1.5'"),
    (
        "cpus = 1\ntimeout = 1979-05-27",
        "line 2: `timeout` must be a string or a number",
    ),
    (
        "timeout = 99999999999999999999999999",
        "line 1: invalid value '99999999999",
    ),
    (
        "kernel = 5.4",
        "line 1: invalid value '5.4' for '--kernel <KERNEL>'",
    ),
    (
        "device = \"tpu\"",
        "line 1: invalid value 'tpu' for '--device",
    ),
    ("quiet = 1", "`quiet` must be true or false, not an integer"),
    (
        "quiet = \"yes\"",
        "`quiet` must be true or false, not a string",
    ),
    (
        "env = \"A=1\"",
        "`env` must be a table of variables, or an array",
    ),
    ("env = [\"=1\"]", "line 1: invalid value '=1'"),
    (
        "env = [[\"A=1\"]]",
        "`env` must have strings or numbers, not an array",
    ),
    (
        "env = { A = true }",
        "`env` must give A a string or a number, not a boolean",
    ),
    (
        "[env]\n\"A=B\" = 1",
        "`env` names a variable A=B, with an =",
    ),
    (
        "env = { A = \"\\u0000\" }",
        "`env` has a value with a NUL character",
    ),
    (
        "disk = \"a.img\"",
        "`disk` must be an array, since it may repeat, not a string",
    ),
    ("disk = [\"\"]", "line 1: invalid value '' for '--disk"),
    ("disk = [\"/no/disk\"]", "(c.toml has `disk` in line 1)"),
    (
        "[[network]]\ntap = \"tap0\"",
        "`network` must have strings or numbers",
    ),
    (
        "network = [\"tap=tap0\"]",
        "line 1: invalid value 'tap=tap0' for '--network",
    ),
    ("take = [\"/no/file\"]", "unknown key"),
    (
        "collect = \"/out\"",
        "`collect` must be an array, since it may repeat",
    ),
    ("collect = [\"out\"]", "line 1: invalid value 'out'"),
    (
        "quiet = true\ncollect = [\"/out:c.toml\"]",
        "--collect would overwrite c.toml: remove it, or name another place (c.toml has `collect` in line 2)",
    ),
    (
        "rootfs = \"/no\\nfolder\"",
        "cannot show /no folder to a guest",
    ),
    (
        "rootfs = \"/\"\nworkdir = \"work\"",
        "(c.toml has `workdir` in line 2)",
    ),
    (
        "backend = \"x\"\ndevice = \"cpu\"",
        "c.toml, line 1: the argument '--backend",
    ),
    (
        "placement = \"process\"\ncpus = 1",
        "(c.toml has `cpus` in line 2)",
    ),
    (
        "quiet = true\npin = \"0,0\"",
        "processor 0 twice: each processor of the guest needs one of its own (c.toml has `pin` in line 2)",
    ),
    (
        "placement = \"process\"\njson = \"c.toml\"",
        "--json would overwrite c.toml",
    ),
];

/// Files for `wormhole backend start --config c.toml`.
const BACKEND_FILES: &[(&str, &str)] = &[
    (
        "listen = \"x\"",
        "unknown key `listen`; there are name, placement, device, ",
    ),
    ("tenant_user = [1]", "unknown key `tenant_user`"),
    ("name = \"a/b\"", "line 1: invalid value 'a/b' for '[NAME]'"),
    (
        "name = [\"a\"]",
        "`name` must be a string or a number, not an array",
    ),
    ("tenant-user = 1000", "`tenant-user` must be an array"),
    (
        "tenant-user = [1000, \"root\"]",
        "line 1: invalid value 'root'",
    ),
    (
        "trusted-tenants = \"yes\"",
        "`trusted-tenants` must be true or false",
    ),
    (
        "\nsessions = 0",
        "line 2: invalid value '0' for '--sessions <N>'",
    ),
    (
        "worker-memory = \"1M\"",
        "write a size such as 4G, at least 64M",
    ),
    (
        "worker-memory = \"2G\"\ntenant-memory = \"1G\"",
        "(c.toml has `worker-memory` in line 1, `tenant-memory` in line 2)",
    ),
    ("command = [\"true\"]", "unknown key `command`"),
];

/// Files for `wormhole attach --config c.toml`.
const ATTACH_FILES: &[(&str, &str)] = &[
    ("window = \"w\"", "--vsock <PATH>"),
    (
        "sice = \"258M\"",
        "line 1: unknown key `sice`; did you mean `size`?",
    ),
    (
        "window = \"w\"\nvsock = \"v\"\ncid = 2",
        "line 3: invalid value '2' for '--cid",
    ),
    (
        "window = \"w\"\nserial = \"s\"\ncid = 4",
        "'--serial <PATH>' cannot be used with '--cid <NUMBER>'",
    ),
    (
        "window = \"w\"\nvsock = \"v\"\nbackend = \"b\"",
        "(c.toml has `backend` in line 3)",
    ),
];

/// Files for `wormhole guest start --config c.toml`.
const GUEST_FILES: &[(&str, &str)] = &[
    (
        "kernels = \"k\"",
        "unknown key `kernels`; did you mean `kernel`?",
    ),
    ("name = \"a\"", "--kernel <FILE>"),
    (
        "name = \"a/b\"\nkernel = \"k\"",
        "line 1: invalid value 'a/b' for '<NAME>'",
    ),
    (
        "name = \"a\"\nkernel = \"/no/kernel\"",
        "cannot read /no/kernel",
    ),
    (
        "name = \"a\"\nkernel = [\"k\"]",
        "`kernel` must be a string or a number",
    ),
    (
        "name = \"a\"\nkernel = \"k\"\n\nmemory = \"1M\"",
        "(c.toml has `memory` in line 4)",
    ),
    (
        "name = \"a\"\nkernel = \"k\"\ncpus = 65",
        "line 3: invalid value '65' for '--cpus",
    ),
];

/// Returns the names of what lies below a folder.
fn below(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder").flatten();
    entries
        .flat_map(|entry| {
            let inner = match entry.path().is_dir() {
                true => below(&entry.path()),
                false => Vec::new(),
            };
            let name = entry.path().display().to_string();
            std::iter::once(name).chain(inner)
        })
        .collect()
}

/// Returns the faults of the answer to a command line, and an empty text if there are none.
fn complaint(line: &str, file: Option<&[u8]>, words: &str) -> String {
    let place = tempfile::tempdir().expect("a folder");
    let [work, temporary, runtime, images] =
        ["work", "temporary", "runtime", "images"].map(|name| place.path().join(name));
    for folder in [&work, &temporary, &runtime, &images] {
        fs::create_dir(folder).expect("a folder");
    }
    if let Some(bytes) = file {
        fs::write(work.join("c.toml"), bytes).expect("room");
    }
    let arguments = line.split(' ').map(|word| match word {
        "''" => "",
        word => word,
    });
    let mut command = wormhole(&arguments.collect::<Vec<_>>());
    command
        .current_dir(&work)
        .env("TMPDIR", &temporary)
        .env("XDG_RUNTIME_DIR", &runtime)
        .env("WORMHOLE_RUNTIME", runtime.join("wormhole"))
        .env("WORMHOLE_IMAGES", &images);
    let run = finish(&mut command);
    let is_sentence = run.stderr.lines().count() == 1
        && run.stderr.starts_with("wormhole: ")
        && run.stderr.contains(words);
    let mut left = below(place.path());
    // The folder of backends itself may be made.
    let folders = [
        &work,
        &temporary,
        &runtime,
        &images,
        &runtime.join("wormhole"),
        &work.join("c.toml"),
    ]
    .map(|path| path.display().to_string());
    left.retain(|path| !folders.contains(path));
    if run.status.code() == Some(2) && is_sentence && run.stdout.is_empty() && left.is_empty() {
        return String::new();
    }
    let file = file.map(String::from_utf8_lossy).unwrap_or_default();
    format!("{line} with {file:?}, not {words}: {run:?}, left {left:?}\n")
}

#[test]
fn every_bad_configuration_is_refused_in_one_sentence_and_leaves_nothing() {
    let _alone = alone();
    let run_files = RUN_FILES.iter().map(|(text, words)| {
        let needs_program = !words.contains("<COMMAND>") && !text.contains("command");
        let line = match needs_program {
            true => "run --config c.toml true",
            false => "run --config c.toml",
        };
        (line, Some(text.as_bytes().to_vec()), *words)
    });
    let backend_files = BACKEND_FILES.iter().map(|(text, words)| {
        let line = "backend start --config c.toml";
        (line, Some(text.as_bytes().to_vec()), *words)
    });
    let attach_files = ATTACH_FILES.iter().map(|(text, words)| {
        let line = "attach --config c.toml";
        (line, Some(text.as_bytes().to_vec()), *words)
    });
    let guest_files = GUEST_FILES.iter().map(|(text, words)| {
        let line = "guest start --config c.toml";
        (line, Some(text.as_bytes().to_vec()), *words)
    });
    let mut deep = b"env = ".to_vec();
    deep.resize(1 << 20, b'[');
    let many = format!("env = [{}]", "\"A=1\",".repeat(5000));
    let hostile = [
        (b"cpus = 1\n\xff = 2".to_vec(), "line 2: not text in UTF-8"),
        (vec![b'#'; (1 << 20) + 1], "it is larger than 1 MiB"),
        (deep, "line 1: not valid TOML"),
        (b"a.".repeat(1 << 19), "line 1: not valid TOML"),
        (many.into_bytes(), "a file can have 4096 values"),
        (vec![b'x'; 1 << 19], "line 1: not valid TOML"),
    ];
    let hostile = hostile
        .into_iter()
        .map(|(bytes, words)| ("run --config c.toml true", Some(bytes), words));
    let cases: Vec<_> = FLAGS
        .iter()
        .map(|(line, words)| (*line, None, *words))
        .chain(run_files)
        .chain(backend_files)
        .chain(attach_files)
        .chain(guest_files)
        .chain(hostile)
        .collect();
    let complaints: String = cases
        .iter()
        .map(|(line, file, words)| complaint(line, file.as_deref(), words))
        .collect();
    assert!(complaints.is_empty(), "of {}:\n{complaints}", cases.len());
    nothing_is_left();
}

//! Runs CUDA programs in a domain of libvirt that docs/qemu.md describes, by a daemon of this test's own.

use std::fs;
use std::os::unix::fs::chown;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use wormhole_images::{Image, Kernel};

use crate::documents::{blocks_of, commands_of, root};
use crate::guest_of_qemu::initrd;
use crate::harness::{
    PATIENCE, Underway, beside_other_guests, eventually, finish, images, program, published_stage,
};

/// User of backend, libvirt and QEMU. libvirt's daemon has no sessions where it runs as root.
const USER: u32 = 65534;

/// Place of the guest's files on the page.
const PLACE: &str = "/srv/guest";

/// Returns the words behind the beginning of the page's only command that begins so.
fn words_behind(begin: &str) -> Vec<String> {
    let commands = commands_of(&root().join("docs/qemu.md"));
    let mut behind = commands.iter().filter_map(|line| line.strip_prefix(begin));
    let words = behind
        .next()
        .unwrap_or_else(|| panic!("docs/qemu.md has no {begin}"));
    assert_eq!(behind.next(), None, "docs/qemu.md has {begin} twice");
    words.split_whitespace().map(str::to_owned).collect()
}

/// Creates a command that runs as [`USER`] in the test's folder.
fn as_user(folder: &Path, program: &Path, arguments: &[&str]) -> Command {
    let user = USER.to_string();
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid", &user, "--regid", &user, "--clear-groups", "--"])
        .arg(program)
        .args(arguments)
        .current_dir(folder)
        .env("HOME", folder)
        .env("XDG_RUNTIME_DIR", folder)
        .env("WORMHOLE_RUNTIME", folder.join("backends"))
        .env_remove("XDG_CONFIG_HOME")
        .env_remove("XDG_CACHE_HOME")
        .stdin(Stdio::null());
    command
}

/// Returns the page's domain with a port in the place of vsock.
fn at_port(blocks: &[String]) -> String {
    const END: &str = "  </devices>\n";
    let [domain, channel] = blocks else {
        panic!("docs/qemu.md has {} blocks of XML", blocks.len());
    };
    let domain = domain.replacen(END, &format!("{channel}{END}"), 1);
    let mut lines: Vec<&str> = domain.lines().collect();
    let end = lines
        .iter()
        .position(|line| line.contains("</qemu:commandline>"))
        .expect("the page has arguments of QEMU");
    let vsock: Vec<&str> = lines.drain(end - 4..end).collect();
    assert!(vsock.concat().contains("vhost-user-vsock"), "{vsock:?}");
    lines.join("\n")
}

#[test]
fn a_domain_of_libvirt_runs_programs_as_the_page_describes_it() {
    let _beside = beside_other_guests();
    let stage = published_stage();
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    chown(folder, Some(USER), Some(USER)).expect("this is root");
    let wormhole = stage.path().join("bin/wormhole");
    let done = |program: &Path, arguments: &[String]| {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let arguments = &arguments[..];
        let run = finish(&mut as_user(folder, program, arguments));
        assert!(
            run.status.success(),
            "{arguments:?}: {}{}",
            run.stdout,
            run.stderr
        );
        run.stdout
    };
    let words = |text: &[&str]| {
        text.iter()
            .map(|word| (*word).to_owned())
            .collect::<Vec<_>>()
    };
    let of_page = |verb: &str| {
        let mut command = words(&[verb]);
        command.extend(words_behind(&format!(
            "target/wormhole/bin/wormhole {verb} "
        )));
        command
    };
    let mut start = of_page("backend");
    // This user has no cgroup.
    start.push("--trusted-tenants".to_owned());
    done(&wormhole, &start);
    let attach = of_page("attach");
    let attach: Vec<&str> = attach.iter().map(String::as_str).collect();
    let attached = Underway::start(&mut as_user(folder, &wormhole, &attach));
    let line = attached.working();
    assert!(line.starts_with("attached: "), "{line}");
    let ended = |process: Underway| {
        let ended = process.finish();
        assert!(ended.status.success(), "{}", ended.stderr);
    };

    let kernel = Image::guest(&images(), Kernel::V6_1).expect("an image");
    fs::copy(kernel.kernel, folder.join("vmlinuz")).expect("a kernel");
    let here = folder.to_str().expect("a name of text");
    let page = blocks_of(&root().join("docs/qemu.md"), "xml").swap_remove(0);
    fs::write(folder.join("guest.xml"), page.replace(PLACE, here)).expect("a file");

    // No further daemon writes the console's file.
    let settings = folder.join(".config/libvirt");
    fs::create_dir_all(&settings).expect("a folder");
    fs::write(settings.join("qemu.conf"), "stdio_handler = \"file\"\n").expect("a file");
    for made in [".config", ".config/libvirt"] {
        chown(folder.join(made), Some(USER), Some(USER)).expect("this is root");
    }
    let daemon = Underway::start(&mut as_user(folder, Path::new("/usr/sbin/libvirtd"), &[]));
    let socket = folder.join("libvirt/libvirt-sock");
    eventually("the daemon's socket", PATIENCE, || socket.exists());
    let by_page = |verb: &str| {
        let begin = format!("virsh -c qemu:///session {verb} ");
        let mut arguments = words(&["-c", "qemu:///session", verb]);
        arguments.extend(words_behind(&begin));
        done(Path::new("/usr/bin/virsh"), &arguments)
    };
    by_page("define");

    let names = ["vector_add", "reduction", "streams_events"];
    let paths = names.map(|name| program("static", name).display().to_string());
    let script = format!(
        "{} && echo all have passed; while :; do :; done",
        paths.join(" && ")
    );
    initrd(folder, "initrd.img", &script, &names);
    by_page("start");
    let console = || fs::read_to_string(folder.join("console.log")).unwrap_or_default();
    eventually("the programs' end", PATIENCE, || {
        let said = console();
        assert!(!said.contains("FAIL"), "{said}");
        said.contains("all have passed")
    });
    let said = console();
    for words in names.map(|name| format!("PASS {name}")) {
        assert!(said.contains(&words), "{words}: {said}");
    }
    let session = |verb: &str| {
        let arguments = ["-q", "-c", "qemu:///session", verb, "guest"];
        done(Path::new("/usr/bin/virsh"), &words(&arguments))
    };
    session("destroy");
    session("undefine");
    let with_port = at_port(&blocks_of(&root().join("docs/qemu.md"), "xml"));
    fs::write(folder.join("port.xml"), with_port.replace(PLACE, here)).expect("a file");
    let command = ["-q", "-c", "qemu:///session", "domxml-to-native"];
    let command = words(&[&command[..], &["qemu-argv", "port.xml"]].concat());
    let said = done(Path::new("/usr/bin/virsh"), &command);
    // QEMU connects: it has no option of a server.
    let socket = format!("-chardev socket,id=charchannel0,path={here}/serial -device");
    for words in [
        &socket,
        "virtserialport",
        "\"name\":\"org.wormhole.control\"",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    // The window ends with its guest.
    ended(attached);

    let pid = Pid::from_raw(daemon.id().cast_signed()).expect("a process");
    kill_process(pid, Signal::TERM).expect("it runs");
    ended(daemon);
    done(&wormhole, &words(&["backend", "stop"]));
}

//! Checks of the scripts that build and run GVirtuS, without GVirtuS: their refusals, and what a program over it gets.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("gvirtus")
        .join(name)
}

fn output(name: &str, arguments: &[&str]) -> Output {
    Command::new(script(name))
        .args(arguments)
        .output()
        .expect("it starts")
}

#[test]
fn scripts_for_gvirtus_refuse_wrong_arguments() {
    let folder = tempfile::tempdir().expect("a folder");
    let empty = folder.path().to_str().expect("text");
    let made = folder.path().join("made");
    fs::create_dir_all(made.join("lib/frontend")).expect("a folder");
    fs::create_dir(made.join("bin")).expect("a folder");
    let backend = made.join("bin/gvirtus-backend");
    fs::write(&backend, "").expect("a file");
    fs::set_permissions(&backend, fs::Permissions::from_mode(0o755)).expect("its mode");
    let made = made.to_str().expect("text");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = taken.local_addr().expect("its address").port().to_string();
    let cases: [(&str, &[&str], &str); 9] = [
        ("build", &[], "build: needs three arguments: "),
        (
            "build",
            &[empty, empty, "new"],
            "is not a checkout of GVirtuS",
        ),
        ("serve", &[], "serve: needs one or two arguments: "),
        ("serve", &[empty], "has no bin/gvirtus-backend"),
        ("serve", &[empty, "70000"], "70000 is not a port"),
        ("serve", &[made, &taken], "is in use; give another one"),
        (
            "run",
            &[made, "127.0.0.1:9999"],
            "run: needs at least three arguments: ",
        ),
        (
            "run",
            &[empty, "127.0.0.1:9999", "true"],
            "has no lib/frontend",
        ),
        (
            "run",
            &[made, "localhost:9999", "true"],
            "localhost:9999 is not an IPv4 address and a port",
        ),
    ];
    for (name, arguments, expected) in cases {
        let output = output(name, arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{name}: {errors}");
        assert!(errors.contains(expected), "{name}: {errors}");
    }
}

#[test]
fn a_program_over_gvirtus_finds_the_frontend_first_and_no_gpu() {
    let folder = tempfile::tempdir().expect("a folder");
    let frontend = folder.path().join("lib/frontend");
    fs::create_dir_all(&frontend).expect("a folder");
    // No library, so the loader ignores it.
    fs::write(frontend.join("libcudart.so.13"), "").expect("a file");
    let output = Command::new(script("run"))
        .arg(folder.path())
        .args(["127.0.0.1:9471", "sh", "-c"])
        .arg("echo \"$LD_PRELOAD\"; echo \"$LD_LIBRARY_PATH\"; echo \"<$CUDA_VISIBLE_DEVICES>\"; cat \"$GVIRTUS_CONFIG\"; exit 7")
        .env("LD_LIBRARY_PATH", "/elsewhere")
        .env("CUDA_VISIBLE_DEVICES", "0")
        .output()
        .expect("it starts");
    assert_eq!(output.status.code(), Some(7));
    let printed = String::from_utf8(output.stdout).expect("text");
    let lines: Vec<&str> = printed.lines().collect();
    let frontend = frontend.to_str().expect("text");
    assert!(
        lines[0].starts_with(&format!("{frontend}/libcudart.so.13:")),
        "{printed}"
    );
    assert_eq!(lines[1], format!("{frontend}:/elsewhere"));
    assert_eq!(lines[2], "<>");
    let properties: serde_json::Value = serde_json::from_str(&lines[3..].join("")).expect("JSON");
    let endpoint = &properties["communicator"][0]["endpoint"];
    assert_eq!(endpoint["server_address"], "127.0.0.1");
    assert_eq!(endpoint["port"], "9471");
}

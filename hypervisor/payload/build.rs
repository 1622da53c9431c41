//! Links the payloads without a C runtime, at fixed addresses, with each segment on its own 2 MiB
//! pages so that the monitor can set the permissions of each segment.

fn main() {
    for argument in [
        "-nostartfiles",
        "-nostdlib",
        "-static",
        "-no-pie",
        "-Wl,-z,max-page-size=0x200000",
        "-Wl,-z,separate-code",
        "-Wl,-z,norelro",
        "-Wl,--build-id=none",
    ] {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
    println!("cargo:rerun-if-changed=build.rs");
}

//! Links the programs without a C runtime, at fixed addresses, each segment on 2 MiB pages of its
//! own so that the monitor can give each its own permissions.

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

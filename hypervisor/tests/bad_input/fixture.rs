//! Good arguments, and destroyed ones.

use std::collections::HashMap;

use crate::library::Library;

/// A kernel that does nothing with its parameter, and one that faults.
pub const IMAGE: &[u8] = b"
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 variable = 7;
.visible .entry kernel(.param .u64 address) { ret; }
.visible .entry fault() { trap; ret; }
\0";

/// Bytes of the device allocation, and of the pinned one.
pub const BYTES: u64 = 1 << 20;

/// Handles by their C type, live and destroyed.
#[derive(Debug)]
pub struct Fixture {
    library: Library,
    live: HashMap<&'static str, u64>,
    gone: HashMap<&'static str, u64>,
    pub context: u64,
}

fn place(value: &mut u64) -> u64 {
    std::ptr::from_mut(value).expose_provenance() as u64
}

impl Fixture {
    /// Makes everything anew in the primary context; `None` if the device is no longer of use.
    pub fn new(library: Library) -> Option<Self> {
        let mut fixture = Self {
            library,
            live: HashMap::new(),
            gone: HashMap::new(),
            context: 0,
        };
        fixture.fill().map(|()| fixture)
    }

    fn fill(&mut self) -> Option<()> {
        self.context = self.make("cuDevicePrimaryCtxRetain", &[0])?;
        self.run("cuCtxSetCurrent", &[self.context])?;
        self.live.insert("CUcontext", self.context);
        let other = self.make("cuCtxCreate_v2", &[0, 0])?;
        self.run("cuCtxDestroy_v2", &[other])?;
        self.run("cuCtxSetCurrent", &[self.context])?;
        self.gone.insert("CUcontext", other);
        self.both("CUdeviceptr", "cuMemAlloc_v2", &[BYTES], "cuMemFree_v2")?;
        self.both("host", "cuMemAllocHost_v2", &[BYTES], "cuMemFreeHost")?;
        self.both("CUstream", "cuStreamCreate", &[1], "cuStreamDestroy_v2")?;
        self.both("CUevent", "cuEventCreate", &[0], "cuEventDestroy_v2")?;
        self.both("CUlinkState", "cuLinkCreate_v2_", &[], "cuLinkDestroy")?;
        let image = IMAGE.as_ptr().expose_provenance() as u64;
        for (kind, load, unload, code, find) in [
            (
                "CUmodule",
                "cuModuleLoadData",
                "cuModuleUnload",
                "CUfunction",
                "cuModuleGetFunction",
            ),
            (
                "CUlibrary",
                "cuLibraryLoadData",
                "cuLibraryUnload",
                "CUkernel",
                "cuLibraryGetKernel",
            ),
        ] {
            let name = c"kernel".as_ptr().expose_provenance() as u64;
            let gone = self.make(load, &[image])?;
            let code_gone = self.make(find, &[gone, name])?;
            self.run(unload, &[gone])?;
            self.gone.extend([(kind, gone), (code, code_gone)]);
            let live = self.make(load, &[image])?;
            let code_live = self.make(find, &[live, name])?;
            self.live.extend([(kind, live), (code, code_live)]);
        }
        Some(())
    }

    fn run(&self, name: &str, arguments: &[u64]) -> Option<()> {
        (self.library.call(name, arguments) == 0).then_some(())
    }

    /// Calls a function that writes what it made to its first argument.
    fn make(&self, name: &str, arguments: &[u64]) -> Option<u64> {
        let mut made = 0;
        let arguments: Vec<u64> = std::iter::once(place(&mut made))
            .chain(arguments.iter().copied())
            .collect();
        self.run(name, &arguments)?;
        Some(made)
    }

    /// Makes two of a kind and destroys the first.
    fn both(&mut self, kind: &'static str, make: &str, arguments: &[u64], end: &str) -> Option<()> {
        let made = || match make.strip_suffix('_') {
            // The one maker that writes elsewhere: to its fourth argument.
            Some(make) => {
                let mut made = 0;
                self.run(make, &[0, 0, 0, place(&mut made)])?;
                Some(made)
            }
            None => self.make(make, arguments),
        };
        let (gone, live) = (made()?, made()?);
        self.run(end, &[gone])?;
        self.gone.insert(kind, gone);
        self.live.insert(kind, live);
        Some(())
    }

    /// Makes the device fault; gives the code of the wait.
    pub fn fault(&self) -> u32 {
        let module = self.live["CUmodule"];
        let name = c"fault".as_ptr().expose_provenance() as u64;
        let Some(function) = self.make("cuModuleGetFunction", &[module, name]) else {
            return 0;
        };
        let launch = [function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0];
        self.library.call("cuLaunchKernel", &launch);
        self.library.call("cuCtxSynchronize", &[])
    }

    /// A live thing of a type.
    pub fn live(&self, kind: &str) -> Option<u64> {
        self.live.get(kind).copied()
    }

    /// A destroyed one.
    pub fn gone(&self, kind: &str) -> Option<u64> {
        self.gone.get(kind).copied()
    }

    /// The context is current still, and its device works; otherwise the code that says not.
    pub fn health(&self) -> Result<(), u32> {
        let mut current = 0;
        match self.library.call("cuCtxGetCurrent", &[place(&mut current)]) {
            0 if current == self.context => {}
            0 => return Err(0),
            code => return Err(code),
        }
        match self.library.call("cuCtxSynchronize", &[]) {
            0 => Ok(()),
            code => Err(code),
        }
    }
}

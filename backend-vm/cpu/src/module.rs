//! Modules, their variables and their kernels.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wormhole_device::{
    CuError, Launch, LoadedFunction, LoadedModule, Parameter, RawFunction, RawModule, Result,
};

use crate::description::{MAX_BLOCK_THREADS, SHARED_PER_BLOCK, SHARED_PER_BLOCK_OPTIN};
use crate::launch::Needs;
use crate::limits::Limits;
use crate::memory::Memory;
use crate::output::Output;
use crate::scheduler::Work;

#[derive(Debug, Default)]
pub struct Modules {}

#[derive(Debug)]
pub struct Kernel {}

impl Modules {
    pub fn load(&self, _image: &[u8], _memory: &Arc<Memory>) -> Result<LoadedModule> {
        Err(CuError::NOT_SUPPORTED)
    }
    pub fn check(&self, _module: RawModule) -> Result<()> {
        Err(CuError::INVALID_HANDLE)
    }
    pub fn unload(&self, _module: RawModule) -> Result<()> {
        Err(CuError::INVALID_HANDLE)
    }
    pub fn function(&self, _module: RawModule, _name: &str) -> Result<LoadedFunction> {
        Err(CuError::INVALID_HANDLE)
    }
    pub fn global(&self, _module: RawModule, _name: &str) -> Result<(u64, u64)> {
        Err(CuError::INVALID_HANDLE)
    }
    pub fn kernel(&self, _function: RawFunction) -> Result<Arc<Kernel>> {
        Err(CuError::INVALID_HANDLE)
    }
}

impl Kernel {
    pub fn attribute(&self, _attribute: i32) -> Result<i32> {
        Err(CuError::INVALID_HANDLE)
    }
    pub fn set_attribute(&self, _attribute: i32, _value: i32) -> Result<()> {
        Err(CuError::INVALID_HANDLE)
    }
    pub fn needs(&self) -> Needs {
        Needs {
            max_threads: 0,
            shared: 0,
            max_dynamic_shared: 0,
            registers: 0,
            parameters: 0,
        }
    }
    pub fn work(
        &self,
        _launch: &Launch<'_>,
        _cooperative: bool,
        _memory: Arc<Memory>,
        _output: Arc<Output>,
        _limits: &Limits,
        _cancel: Arc<AtomicBool>,
    ) -> Work {
        Box::new(|| Err(CuError::NOT_SUPPORTED))
    }
}

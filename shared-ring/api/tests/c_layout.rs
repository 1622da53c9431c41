//! Layout of the C structures against `cuda.h`, by a C program that the test compiles.

use std::fmt::Write as _;
use std::io::Write as _;
use std::mem::offset_of;
use std::path::Path;
use std::process::{Command, Stdio};

use wormhole_api::ctypes::*;

const HEADER: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../target/cuda-toolkit/nvidia/cu13/include"
);

/// Sources that declare the structures.
const SOURCES: [&str; 3] = [
    include_str!("../src/ctypes.rs"),
    include_str!("../src/ctypes/arrays.rs"),
    include_str!("../src/ctypes/graphs.rs"),
];

/// Names of the structures, and a C program that fails to compile unless each is laid out as in `cuda.h`.
#[derive(Default)]
struct Program {
    structures: Vec<&'static str>,
    text: String,
}

impl Program {
    fn assert(&mut self, left: &str, right: usize) {
        let _ = writeln!(
            self.text,
            "_Static_assert({left} == {right}, \"{left} is not {right}\");"
        );
    }

    fn field(&mut self, structure: &str, field: &str, offset: usize, bytes: Option<usize>) {
        let field = field.trim_start_matches("r#");
        self.assert(&format!("offsetof({structure}, {field})"), offset);
        if let Some(bytes) = bytes {
            self.assert(&format!("sizeof((({structure} *)0)->{field})"), bytes);
        }
    }
}

/// Returns the size of the field that `_get` returns.
fn bytes_of<S, F>(_get: impl Fn(&S) -> &F) -> usize {
    size_of::<F>()
}

/// Adds structures with all their fields; a field that is missing here does not compile. `as` gives a structure's name
/// in C where it differs, `=` a field's. A field after `@` begins where that of C does, and has another size.
macro_rules! structures {
    ($program:ident: $($name:ident $(as $c_name:literal)? {
        $($field:ident $(= $c_field:literal)? $(@ $c_start:literal)?),* $(,)?
    })*) => {
        $(
            let _ = |all: &$name| { let $name { $($field: _),* } = *all; };
            let name = [$($c_name,)? stringify!($name)][0];
            $program.structures.push(stringify!($name));
            $program.assert(&format!("sizeof({name})"), size_of::<$name>());
            $(
                let field = [$($c_field,)? $($c_start,)? stringify!($field)][0];
                let bytes = bytes_of(|all: &$name| &all.$field);
                let begins_only: &[&str] = &[$($c_start)?];
                let bytes = begins_only.is_empty().then_some(bytes);
                $program.field(name, field, offset_of!($name, $field), bytes);
            )*
        )*
    };
}

fn program() -> Program {
    let mut program = Program::default();
    program
        .text
        .push_str("#include <cuda.h>\n#include <stddef.h>\n");
    structures!(program:
        CUuuid { bytes }
        CUlaunchAttribute { id, pad, value }
        CUlaunchConfig {
            gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream,
            attrs, numAttrs,
        }
        CUDA_MEMCPY2D {
            srcXInBytes, srcY, srcMemoryType, srcHost, srcDevice, srcArray, srcPitch, dstXInBytes,
            dstY, dstMemoryType, dstHost, dstDevice, dstArray, dstPitch, WidthInBytes, Height,
        }
        CUmemLocation { r#type, id }
        CUDA_LAUNCH_PARAMS {
            function, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ,
            sharedMemBytes, hStream, kernelParams,
        }
        CUexecAffinityParam { r#type, smCount = "param.smCount.val" }
        CUctxCreateParams { execAffinityParams, numExecAffinityParams, cigParams }
        CUtensorMap { opaque }
        CUstreamBatchMemOpParams {
            operation, barrier_flags = "memoryBarrier.flags", address = "waitValue.address",
            value64 = "waitValue.value64", flags = "waitValue.flags", alias = "waitValue.alias",
            pad = "pad[5]",
        }
        CUdevprop {
            maxThreadsPerBlock, maxThreadsDim, maxGridSize, sharedMemPerBlock, totalConstantMemory,
            SIMDWidth, memPitch, regsPerBlock, clockRate, textureAlign,
        }
        CUgraphEdgeData { from_port, to_port, r#type, reserved }
        CUmemAccessDesc { location, flags }
        CUmemAllocationProp {
            r#type, requestedHandleTypes, location, win32HandleMetaData,
            compressionType = "allocFlags.compressionType",
            gpuDirectRDMACapable = "allocFlags.gpuDirectRDMACapable", usage = "allocFlags.usage",
            reserved = "allocFlags.reserved",
        }
        CUmemcpyAttributes { srcAccessOrder, srcLocHint, dstLocHint, flags }
        CUmemcpy3DOperand { kind = "type", place = "op" }
        CUDA_MEMCPY3D_BATCH_OP { src, dst, extent, srcAccessOrder, flags }
        CUdevResource {
            r#type, padding = "_internal_padding", smCount = "sm.smCount",
            minSmPartitionSize = "sm.minSmPartitionSize",
            smCoscheduledAlignment = "sm.smCoscheduledAlignment", rest @ "_oversize[12]",
        }
        CUipcMemHandle { reserved }
        CUipcEventHandle { reserved }
        CUmemPoolPtrExportData { reserved }
        CUmemPoolProps {
            allocType, handleTypes, location, win32SecurityAttributes, maxSize, usage, reserved,
        }
        CUDA_MEMCPY3D {
            srcXInBytes, srcY, srcZ, srcLOD, srcMemoryType, srcHost, srcDevice, srcArray,
            reserved0, srcPitch, srcHeight, dstXInBytes, dstY, dstZ, dstLOD, dstMemoryType,
            dstHost, dstDevice, dstArray, reserved1, dstPitch, dstHeight, WidthInBytes, Height,
            Depth,
        }
        CUDA_ARRAY_DESCRIPTOR { Width, Height, Format, NumChannels }
        CUDA_ARRAY3D_DESCRIPTOR { Width, Height, Depth, Format, NumChannels, Flags }
        CUDA_RESOURCE_DESC {
            resType, address = "res.pitch2D.devPtr", format = "res.pitch2D.format",
            numChannels = "res.pitch2D.numChannels", width = "res.pitch2D.width",
            height = "res.pitch2D.height", pitchInBytes = "res.pitch2D.pitchInBytes",
            reserved @ "res.reserved.reserved[10]", flags,
        }
        CUDA_TEXTURE_DESC {
            addressMode, filterMode, flags, maxAnisotropy, mipmapFilterMode, mipmapLevelBias,
            minMipmapLevelClamp, maxMipmapLevelClamp, borderColor, reserved,
        }
        CUDA_RESOURCE_VIEW_DESC {
            format, width, height, depth, firstMipmapLevel, lastMipmapLevel, firstLayer, lastLayer,
            reserved,
        }
        CUDA_KERNEL_NODE_PARAMS_v1 {
            func, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes,
            kernelParams, extra,
        }
        CUDA_KERNEL_NODE_PARAMS as "CUDA_KERNEL_NODE_PARAMS_v3" { first @ "func", kern, ctx }
        CUDA_MEMCPY_NODE_PARAMS { flags, reserved, copyCtx, copyParams }
        CUDA_MEMSET_NODE_PARAMS as "CUDA_MEMSET_NODE_PARAMS_v1" {
            dst, pitch, value, elementSize, width, height,
        }
        CUDA_HOST_NODE_PARAMS { r#fn, userData }
        CUDA_BATCH_MEM_OP_NODE_PARAMS { ctx, count, paramArray, flags }
        CUDA_MEM_ALLOC_NODE_PARAMS { poolProps, accessDescs, accessDescCount, bytesize, dptr }
        CUDA_CHILD_GRAPH_NODE_PARAMS { graph, ownership }
        CUDA_CONDITIONAL_NODE_PARAMS { handle, r#type, size, phGraph_out, ctx }
        CUDA_EVENT_NODE_PARAMS as "CUDA_EVENT_RECORD_NODE_PARAMS" { event }
        CUgraphNodeParams { r#type, reserved0, words = "reserved1", reserved2 }
        CUDA_GRAPH_INSTANTIATE_PARAMS { flags, hUploadStream, hErrNode_out, result_out }
        CUgraphExecUpdateResultInfo { result, errorNode, errorFromNode }
    );
    // Types that share a structure, because C lays them out alike.
    program.assert(
        "sizeof(CUDA_MEMCPY3D_PEER)",
        size_of::<CUDA_MEMCPY3D_PEER>(),
    );
    let contexts = [
        ("srcContext", offset_of!(CUDA_MEMCPY3D_PEER, reserved0)),
        ("dstContext", offset_of!(CUDA_MEMCPY3D_PEER, reserved1)),
    ];
    for (context, offset) in contexts {
        program.field(
            "CUDA_MEMCPY3D_PEER",
            context,
            offset,
            Some(size_of::<usize>()),
        );
    }
    let members = [
        ("array.hArray", offset_of!(CUDA_RESOURCE_DESC, address)),
        (
            "mipmap.hMipmappedArray",
            offset_of!(CUDA_RESOURCE_DESC, address),
        ),
        ("linear.devPtr", offset_of!(CUDA_RESOURCE_DESC, address)),
        ("linear.format", offset_of!(CUDA_RESOURCE_DESC, format)),
        (
            "linear.numChannels",
            offset_of!(CUDA_RESOURCE_DESC, numChannels),
        ),
        ("linear.sizeInBytes", offset_of!(CUDA_RESOURCE_DESC, width)),
    ];
    for (member, offset) in members {
        program.field("CUDA_RESOURCE_DESC", &format!("res.{member}"), offset, None);
    }
    program.field(
        "CUDA_EVENT_WAIT_NODE_PARAMS",
        "event",
        0,
        Some(size_of::<CUevent>()),
    );
    program.field(
        "CUDA_KERNEL_NODE_PARAMS_v2",
        "kern",
        offset_of!(CUDA_KERNEL_NODE_PARAMS, kern),
        None,
    );
    program.field(
        "CUDA_KERNEL_NODE_PARAMS_v2",
        "ctx",
        offset_of!(CUDA_KERNEL_NODE_PARAMS, ctx),
        None,
    );
    program
}

#[test]
fn every_structure_is_compared() {
    let declarations = SOURCES.iter().flat_map(|source| source.lines());
    let declared: Vec<&str> = declarations
        .filter_map(|line| {
            line.strip_prefix("pub struct ")?
                .split([' ', '(', '<'])
                .next()
        })
        .collect();
    let compared = program().structures;
    let missing: Vec<_> = declared
        .iter()
        .filter(|one| !compared.contains(one))
        .collect();
    assert!(
        missing.is_empty(),
        "{missing:?} are not compared with cuda.h"
    );
    assert_eq!(declared.len(), compared.len());
}

#[test]
fn every_structure_is_laid_out_as_in_cuda_h() {
    if !Path::new(HEADER).join("cuda.h").exists() {
        // `cargo xtask test` sets the variable, after it has installed the header.
        assert_eq!(
            std::env::var_os("WORMHOLE_PROGRAMS"),
            None,
            "no {HEADER}/cuda.h"
        );
        println!("skipped: no {HEADER}/cuda.h; `cargo xtask setup` installs it");
        return;
    }
    let mut compiler = Command::new("cc")
        .args(["-fsyntax-only", "-x", "c", "-I", HEADER, "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a C compiler");
    let mut source = compiler.stdin.take().expect("its input");
    source
        .write_all(program().text.as_bytes())
        .expect("the program is read");
    drop(source);
    let compiled = compiler.wait_with_output().expect("the compiler ends");
    let errors = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{errors}");
}

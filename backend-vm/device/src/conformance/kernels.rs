//! Kernels of the checks.

/// Kernels that set conditions of the graph that runs them.
pub const CONDITIONS: &str = r"
.version 8.3
.target sm_70
.address_size 64

.extern .func cudaGraphSetConditional(.param .b64 condition, .param .b32 value);

// condition = *address
.visible .entry decide(.param .u64 condition, .param .u64 address)
{
    .reg .b64 %rd<4>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [condition];
    ld.param.u64 %rd2, [address];
    cvta.to.global.u64 %rd3, %rd2;
    ld.volatile.global.u32 %r1, [%rd3];
    {
        .param .b64 first;
        .param .b32 second;
        st.param.b64 [first+0], %rd1;
        st.param.b32 [second+0], %r1;
        call.uni cudaGraphSetConditional, (first, second);
    }
    ret;
}

// *address -= 1, condition = *address & mask
.visible .entry lower(.param .u64 condition, .param .u64 address, .param .u32 mask)
{
    .reg .b64 %rd<4>;
    .reg .b32 %r<4>;
    ld.param.u64 %rd1, [condition];
    ld.param.u64 %rd2, [address];
    ld.param.u32 %r1, [mask];
    cvta.to.global.u64 %rd3, %rd2;
    ld.global.u32 %r2, [%rd3];
    sub.u32 %r2, %r2, 1;
    st.global.u32 [%rd3], %r2;
    and.b32 %r3, %r2, %r1;
    {
        .param .b64 first;
        .param .b32 second;
        st.param.b64 [first+0], %rd1;
        st.param.b32 [second+0], %r3;
        call.uni cudaGraphSetConditional, (first, second);
    }
    ret;
}
";

/// Kernels that neither print nor assert.
pub const PLAIN: &str = r"
.version 7.0
.target sm_70
.address_size 64

.visible .global .align 4 .u32 counter = 7;
.visible .global .align 4 .u32 table[4] = {1, 2, 3, 4};
.extern .shared .align 4 .b8 dynamic[];

// *address = value
.visible .entry store(.param .u64 address, .param .u32 value)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [address];
    ld.param.u32 %r1, [value];
    cvta.to.global.u64 %rd2, %rd1;
    st.global.u32 [%rd2], %r1;
    ret;
}

// address[i] += 1, one element a thread
.visible .entry add_one(.param .u64 address)
{
    .reg .b64 %rd<5>;
    .reg .b32 %r<7>;
    ld.param.u64 %rd1, [address];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.s32 %r4, %r1, %r2, %r3;
    mul.wide.u32 %rd3, %r4, 4;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.u32 %r5, [%rd4];
    add.s32 %r6, %r5, 1;
    st.global.u32 [%rd4], %r6;
    ret;
}

// y[i] = a * x[i] + y[i] for i < n
.visible .entry saxpy(.param .u32 n, .param .f32 a, .param .u64 x, .param .u64 y)
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .f32 %f<5>;
    .reg .b64 %rd<8>;
    ld.param.u32 %r1, [n];
    ld.param.f32 %f1, [a];
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mul.wide.u32 %rd5, %r5, 4;
    add.s64 %rd6, %rd3, %rd5;
    add.s64 %rd7, %rd4, %rd5;
    ld.global.f32 %f2, [%rd6];
    ld.global.f32 %f3, [%rd7];
    fma.rn.f32 %f4, %f1, %f2, %f3;
    st.global.f32 [%rd7], %f4;
DONE:
    ret;
}

// Waits until *word is not 0.
.visible .entry wait_for(.param .u64 word)
{
    .reg .pred %p<2>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [word];
AGAIN:
    ld.volatile.u32 %r1, [%rd1];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra AGAIN;
    ret;
}

// Says that it is here and waits for another.
.visible .entry meet(.param .u64 mine, .param .u64 other)
{
    .reg .pred %p<2>;
    .reg .b32 %r<3>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [mine];
    ld.param.u64 %rd2, [other];
    mov.u32 %r1, 1;
    st.volatile.u32 [%rd1], %r1;
    membar.sys;
AGAIN:
    ld.volatile.u32 %r2, [%rd2];
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra AGAIN;
    ret;
}

// counter += 1
.visible .entry bump()
{
    .reg .b32 %r<3>;
    ld.global.u32 %r1, [counter];
    add.s32 %r2, %r1, 1;
    st.global.u32 [counter], %r2;
    ret;
}

// address[i] = the thread's neighbour's number, passed through dynamic shared memory
.visible .entry rotate(.param .u64 address)
{
    .reg .pred %p<2>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [address];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, dynamic;
    shl.b32 %r4, %r1, 2;
    add.s32 %r5, %r3, %r4;
    st.shared.u32 [%r5], %r1;
    bar.sync 0;
    add.s32 %r6, %r1, 1;
    rem.u32 %r6, %r6, %r2;
    shl.b32 %r7, %r6, 2;
    add.s32 %r7, %r3, %r7;
    ld.shared.u32 %r8, [%r7];
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd2, %rd3;
    st.global.u32 [%rd4], %r8;
    ret;
}

.visible .entry bounded()
.maxntid 64, 1, 1
{
    ret;
}

.visible .entry fall()
{
    trap;
    ret;
}
";

/// Kernel that triggers the launch of its dependents.
pub const TRIGGERING: &str = r"
.version 7.8
.target sm_90
.address_size 64

// *address = 1, behind the trigger
.visible .entry trigger(.param .u64 address)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [address];
    cvta.to.global.u64 %rd2, %rd1;
    griddepcontrol.launch_dependents;
    mov.u32 %r1, 1;
    st.global.u32 [%rd2], %r1;
    ret;
}
";

/// Kernel that prints `thread 42`, and one whose assertion fails.
pub const TALKING: &str = r#"
.version 7.0
.target sm_70
.address_size 64

.extern .func (.param .b32 result) vprintf(.param .b64 format, .param .b64 arguments);
.extern .func __assertfail
(
    .param .b64 message, .param .b64 file, .param .b32 line, .param .b64 function, .param .b64 size
);

// "thread %d\n"
.global .align 1 .b8 format[11] = {116, 104, 114, 101, 97, 100, 32, 37, 100, 10, 0};
// "false", "check.cu", "refuse"
.global .align 1 .b8 message[6] = {102, 97, 108, 115, 101, 0};
.global .align 1 .b8 file[9] = {99, 104, 101, 99, 107, 46, 99, 117, 0};
.global .align 1 .b8 name[7] = {114, 101, 102, 117, 115, 101, 0};

.visible .entry say(.param .u32 number)
{
    .local .align 8 .b8 __local_depot0[8];
    .reg .b64 %SP;
    .reg .b64 %SPL;
    .reg .b32 %r<4>;
    .reg .b64 %rd<4>;
    mov.u64 %SPL, __local_depot0;
    cvta.local.u64 %SP, %SPL;
    ld.param.u32 %r1, [number];
    add.u64 %rd1, %SP, 0;
    add.u64 %rd2, %SPL, 0;
    st.local.u32 [%rd2], %r1;
    mov.u64 %rd3, format;
    cvta.global.u64 %rd3, %rd3;
    {
        .param .b64 param0;
        st.param.b64 [param0], %rd3;
        .param .b64 param1;
        st.param.b64 [param1], %rd1;
        .param .b32 retval0;
        call.uni (retval0), vprintf, (param0, param1);
        ld.param.b32 %r2, [retval0];
    }
    ret;
}

.visible .entry refuse()
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<5>;
    mov.u64 %rd1, message;
    cvta.global.u64 %rd1, %rd1;
    mov.u64 %rd2, file;
    cvta.global.u64 %rd2, %rd2;
    mov.u32 %r1, 12;
    mov.u64 %rd3, name;
    cvta.global.u64 %rd3, %rd3;
    mov.u64 %rd4, 1;
    {
        .param .b64 param0;
        st.param.b64 [param0], %rd1;
        .param .b64 param1;
        st.param.b64 [param1], %rd2;
        .param .b32 param2;
        st.param.b32 [param2], %r1;
        .param .b64 param3;
        st.param.b64 [param3], %rd3;
        .param .b64 param4;
        st.param.b64 [param4], %rd4;
        call.uni __assertfail, (param0, param1, param2, param3, param4);
    }
    ret;
}
"#;

/// Managed and other variables.
pub const MANAGED: &str = r"
.version 7.0
.target sm_70
.address_size 64

.visible .global .attribute(.managed) .align 4 .u32 first = 5;
.visible .global .attribute(.managed) .align 8 .u64 second[3] = {1, 2, 3};
.visible .global .attribute(.managed) .align 4 .u32 unset[100];
.visible .global .align 4 .u32 own = 7;
.visible .global .align 8 .u64 pointer = generic(first);

// first += own; own += 1; second[1] += 10; unset[99] = *pointer
.visible .entry use()
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<4>;
    ld.global.u32 %r1, [first];
    ld.global.u32 %r2, [own];
    add.u32 %r1, %r1, %r2;
    st.global.u32 [first], %r1;
    add.u32 %r2, %r2, 1;
    st.global.u32 [own], %r2;
    ld.global.u64 %rd1, [second+8];
    add.u64 %rd1, %rd1, 10;
    st.global.u64 [second+8], %rd1;
    ld.global.u64 %rd2, [pointer];
    ld.u32 %r3, [%rd2];
    st.global.u32 [unset+396], %r3;
    ret;
}
";

/// Managed variable that nothing uses.
pub const MANAGED_UNUSED: &str = r"
.version 7.0
.target sm_70
.address_size 64

.visible .global .attribute(.managed) .align 4 .u32 unused = 3;

.visible .entry idle()
{
    ret;
}
";

/// Managed variable alone.
pub const MANAGED_ALONE: &str = r"
.version 7.0
.target sm_70
.address_size 64

.visible .global .attribute(.managed) .align 4 .u32 alone = 3;

.visible .entry use()
{
    .reg .b32 %r<2>;
    ld.global.u32 %r1, [alone];
    add.u32 %r1, %r1, 1;
    st.global.u32 [alone], %r1;
    ret;
}
";

//! Calls of bpf(2) that aya does not have: programs of our own instructions, timed runs, live frames.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use anyhow::{Context, Result, bail};

const BPF_PROG_LOAD: i32 = 5;
const BPF_PROG_TEST_RUN: i32 = 10;
const BPF_LINK_CREATE: i32 = 28;
const BPF_F_TEST_XDP_LIVE_FRAMES: u32 = 2;
/// Attach type and flag of a native XDP link.
const BPF_XDP: u32 = 37;
const XDP_FLAGS_DRV_MODE: u32 = 4;

/// Program types of linux/bpf.h.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub enum Type {
    SchedCls = 3,
    Xdp = 6,
}

// The parts of `union bpf_attr` that are used; the fields have its names.

#[repr(C)]
#[derive(Default)]
struct Load {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct TestRun {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    padding: u32,
}

#[repr(C)]
#[derive(Default)]
struct Link {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
}

fn bpf<T>(command: i32, attributes: &mut T) -> Result<RawFd> {
    // SAFETY: the structures above begin as the kernel's union does, with no holes, and pointers in them live on.
    #[allow(unsafe_code)]
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_mut(attributes),
            size_of::<T>(),
        )
    };
    if result < 0 {
        bail!(std::io::Error::last_os_error());
    }
    Ok(result as RawFd)
}

fn owned(descriptor: RawFd) -> OwnedFd {
    // SAFETY: the kernel just made it for us.
    #[allow(unsafe_code)]
    unsafe {
        OwnedFd::from_raw_fd(descriptor)
    }
}

/// Loads a program made of instructions.
pub fn load(program_type: Type, instructions: &[u64]) -> Result<OwnedFd> {
    let mut attributes = Load {
        prog_type: program_type as u32,
        insn_cnt: instructions.len() as u32,
        insns: instructions.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        ..Load::default()
    };
    bpf(BPF_PROG_LOAD, &mut attributes)
        .map(owned)
        .context("loading a program of instructions")
}

/// Attaches an XDP program natively, for as long as the link is held.
pub fn attach_xdp(program: BorrowedFd, interface: u32) -> Result<OwnedFd> {
    let mut attributes = Link {
        prog_fd: program.as_raw_fd().cast_unsigned(),
        target_ifindex: interface,
        attach_type: BPF_XDP,
        flags: XDP_FLAGS_DRV_MODE,
    };
    bpf(BPF_LINK_CREATE, &mut attributes)
        .map(owned)
        .context("attaching a program of instructions")
}

/// Returns the context of a run: `struct xdp_md` or `struct __sk_buff` of a frame that came in by an interface.
pub fn context(program_type: Type, frame: &[u8], interface: u32) -> Vec<u8> {
    let (size, fields) = match program_type {
        Type::SchedCls => (192, vec![(40, interface)]),
        Type::Xdp => (24, vec![(4, frame.len() as u32), (12, interface)]),
    };
    let mut context = vec![0; size];
    for (offset, value) in fields {
        context[offset..offset + 4].copy_from_slice(&value.to_ne_bytes());
    }
    context
}

/// Runs a program once on a copy of the frame; returns its verdict, and nanoseconds by the kernel's clock.
pub fn run(program: BorrowedFd, frame: &[u8], context: &[u8]) -> Result<(u32, u32)> {
    let mut attributes = attributes(program, frame, context);
    attributes.repeat = 1;
    bpf(BPF_PROG_TEST_RUN, &mut attributes).context("a test run")?;
    Ok((attributes.retval, attributes.duration))
}

/// Runs an XDP program on many frames; each goes where the program sends it.
pub fn run_live(program: BorrowedFd, frame: &[u8], context: &[u8], frames: u32) -> Result<()> {
    let mut attributes = attributes(program, frame, context);
    attributes.repeat = frames;
    attributes.flags = BPF_F_TEST_XDP_LIVE_FRAMES;
    attributes.batch_size = 64;
    bpf(BPF_PROG_TEST_RUN, &mut attributes).context("a run of live frames")?;
    Ok(())
}

fn attributes(program: BorrowedFd, frame: &[u8], context: &[u8]) -> TestRun {
    TestRun {
        prog_fd: program.as_raw_fd().cast_unsigned(),
        data_size_in: frame.len() as u32,
        data_in: frame.as_ptr() as u64,
        ctx_size_in: context.len() as u32,
        ctx_in: context.as_ptr() as u64,
        ..TestRun::default()
    }
}

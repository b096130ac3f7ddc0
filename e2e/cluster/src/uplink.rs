//! The far end of a node's uplink, which makes a veth behave like the NIC that it stands for.
//!
//! A veth takes frames that XDP sends back (XDP_TX) only if its peer has an XDP program too; it loses them otherwise.
//! So the bridge's end gets a program of two instructions that passes everything. The kernel keeps the program as long
//! as the link.

use std::{
    io,
    mem::size_of,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

use anyhow::{Context, Result, bail};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, socket,
};

/// Offloads that must be off so that a device segments and checksums by itself before it sends.
pub const SEGMENTED: [&str; 10] = [
    "tx",
    "off",
    "tso",
    "off",
    "gso",
    "off",
    "tx-udp_tnl-segmentation",
    "off",
    "tx-udp_tnl-csum-segmentation",
    "off",
];

const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_F_XDP_HAS_FRAGS: u32 = 1 << 5;
/// The program `r0 = XDP_PASS (2); exit`, each instruction of 8 bytes: code, registers, offset, immediate value.
const PASS: [[u8; 8]; 2] = [[0xb7, 0, 0, 0, 2, 0, 0, 0], [0x95, 0, 0, 0, 0, 0, 0, 0]];

const IFLA_XDP: u16 = 43;
const IFLA_XDP_FD: u16 = 1;
const IFLA_XDP_FLAGS: u16 = 3;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;
const NLA_F_NESTED: u16 = 1 << 15;

/// The part of `union bpf_attr` that BPF_PROG_LOAD needs, in host byte order; pointers as 64 bit (`linux/bpf.h`).
#[repr(C)]
struct LoadAttributes {
    program_type: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
}

/// Attaches the passing program to `link` in native mode.
pub fn attach_pass(link: &str) -> Result<()> {
    let program = load_pass().context("loading")?;
    let index = nix::net::if_::if_nametoindex(link).with_context(|| format!("index of {link}"))?;
    let request = set_xdp(index, program.as_raw_fd());
    let netlink = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkRoute,
    )?;
    sendto(
        netlink.as_raw_fd(),
        &request,
        &NetlinkAddr::new(0, 0),
        MsgFlags::empty(),
    )?;
    let mut answer = [0; 4096];
    let length = recv(netlink.as_raw_fd(), &mut answer, MsgFlags::empty())?;
    // struct nlmsghdr (16 bytes), then the negative error number of struct nlmsgerr.
    let Some(code) = answer[..length]
        .get(16..20)
        .and_then(|bytes| bytes.try_into().ok())
        .map(i32::from_ne_bytes)
    else {
        bail!("an answer of {length} bytes");
    };
    if code != 0 {
        return Err(io::Error::from_raw_os_error(-code)).context("attaching");
    }
    Ok(())
}

#[allow(unsafe_code)]
fn load_pass() -> io::Result<OwnedFd> {
    let instructions = PASS.concat();
    let license = c"GPL";
    let attributes = LoadAttributes {
        program_type: BPF_PROG_TYPE_XDP,
        instruction_count: PASS.len() as u32,
        instructions: instructions.as_ptr() as u64,
        license: license.as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
        kernel_version: 0,
        flags: BPF_F_XDP_HAS_FRAGS,
    };
    // SAFETY: the attributes and what they point to outlive the call, which writes to none of them (no log).
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_PROG_LOAD,
            &raw const attributes,
            size_of::<LoadAttributes>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given us this descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(result as i32) })
}

/// Returns the message RTM_SETLINK with IFLA_XDP { FD, FLAGS } and NLM_F_ACK (`linux/rtnetlink.h`, `linux/if_link.h`).
fn set_xdp(index: u32, program: i32) -> Vec<u8> {
    let attribute = |kind: u16, value: &[u8]| {
        let mut bytes = (4 + value.len() as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes
    };
    let mut inner = attribute(IFLA_XDP_FD, &program.to_ne_bytes());
    inner.extend(attribute(IFLA_XDP_FLAGS, &XDP_FLAGS_DRV_MODE.to_ne_bytes()));
    let outer = attribute(IFLA_XDP | NLA_F_NESTED, &inner);

    let mut link = vec![0; 16]; // struct ifinfomsg: family 0, type 0, index, flags 0, change 0
    link[4..8].copy_from_slice(&index.to_ne_bytes());

    let flags = (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16;
    let mut message = ((16 + link.len() + outer.len()) as u32).to_ne_bytes().to_vec();
    message.extend(libc::RTM_SETLINK.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend([0; 8]); // sequence number and port
    message.extend(link);
    message.extend(outer);
    message
}

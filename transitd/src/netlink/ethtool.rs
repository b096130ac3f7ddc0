//! The few ethtool requests that Thuban needs, by the classic ioctl (linux/ethtool.h): driver name and features.
//! No crate: `ethtool` (0.2) can ask for features but not set them.
//!
//! Works on the calling thread's network namespace.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use super::NetlinkError;

const ETHTOOL_GDRVINFO: u32 = 0x03;
const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_GFEATURES: u32 = 0x3a;
const ETHTOOL_SFEATURES: u32 = 0x3b;
const ETH_SS_FEATURES: u32 = 4;
const STRING_LENGTH: usize = 32;
/// Offset of `driver` in struct ethtool_drvinfo, and the structure's size.
const DRIVER_OFFSET: usize = 4;
const DRIVER_INFO_SIZE: usize = 196;

/// Returns the driver's name, e.g. `veth`.
pub fn driver(interface: &str) -> Result<String, NetlinkError> {
    let mut buffer = vec![0u32; DRIVER_INFO_SIZE / 4];
    buffer[0] = ETHTOOL_GDRVINFO;
    request(interface, "reading the driver's name", &mut buffer)?;
    let bytes: Vec<u8> = buffer.iter().flat_map(|word| word.to_ne_bytes()).collect();
    Ok(text(&bytes[DRIVER_OFFSET..DRIVER_OFFSET + STRING_LENGTH]))
}

/// Whether a feature that `ethtool -k` would show under that name is on.
pub fn is_on(interface: &str, feature: &str) -> Result<bool, NetlinkError> {
    let names = feature_names(interface)?;
    let Some(bit) = names.iter().position(|name| name == feature) else {
        return Ok(false);
    };
    let blocks = names.len().div_ceil(32);
    // struct ethtool_gfeatures: cmd, size, then { available, requested, active, never_changed } a block.
    let mut buffer = vec![0u32; 2 + blocks * 4];
    buffer[0] = ETHTOOL_GFEATURES;
    buffer[1] = blocks as u32;
    request(interface, "reading features", &mut buffer)?;
    Ok(buffer[2 + (bit / 32) * 4 + 2] & (1 << (bit % 32)) != 0)
}

/// Turns features off. A feature that this kernel does not know can't be on.
pub fn turn_off(interface: &str, features: &[&str]) -> Result<(), NetlinkError> {
    set(interface, features, false)
}

pub fn turn_on(interface: &str, features: &[&str]) -> Result<(), NetlinkError> {
    set(interface, features, true)
}

fn set(interface: &str, features: &[&str], on: bool) -> Result<(), NetlinkError> {
    let names = feature_names(interface)?;
    let blocks = names.len().div_ceil(32);
    // struct ethtool_sfeatures: cmd, size, then { valid, requested } a block.
    let mut buffer = vec![0u32; 2 + blocks * 2];
    buffer[0] = ETHTOOL_SFEATURES;
    buffer[1] = blocks as u32;
    for bit in features
        .iter()
        .filter_map(|feature| names.iter().position(|name| name == feature))
    {
        let block = 2 + (bit / 32) * 2;
        buffer[block] |= 1 << (bit % 32);
        if on {
            buffer[block + 1] |= 1 << (bit % 32);
        }
    }
    request(interface, "setting features", &mut buffer)
}

fn feature_names(interface: &str) -> Result<Vec<String>, NetlinkError> {
    // struct ethtool_sset_info: cmd, reserved, sset_mask (64 bits), data[].
    let mut buffer = vec![0u32; 5];
    buffer[0] = ETHTOOL_GSSET_INFO;
    let mask = (1u64 << ETH_SS_FEATURES).to_ne_bytes();
    buffer[2] = u32::from_ne_bytes([mask[0], mask[1], mask[2], mask[3]]);
    buffer[3] = u32::from_ne_bytes([mask[4], mask[5], mask[6], mask[7]]);
    request(interface, "counting features", &mut buffer)?;
    let count = buffer[4] as usize;
    // struct ethtool_gstrings: cmd, string_set, len, data[len * 32].
    let mut buffer = vec![0u32; 3 + count * STRING_LENGTH / 4];
    buffer[0] = ETHTOOL_GSTRINGS;
    buffer[1] = ETH_SS_FEATURES;
    buffer[2] = count as u32;
    request(interface, "reading feature names", &mut buffer)?;
    let bytes: Vec<u8> = buffer[3..].iter().flat_map(|word| word.to_ne_bytes()).collect();
    Ok(bytes.chunks(STRING_LENGTH).map(text).collect())
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// Sends a request. `buffer` starts with the command and is as long as the command's structure for the sizes in it.
fn request(interface: &str, operation: &'static str, buffer: &mut [u32]) -> Result<(), NetlinkError> {
    let failed = |source| NetlinkError::Ethtool {
        operation,
        interface: interface.to_owned(),
        source,
    };
    let socket: OwnedFd = socket(
        AddressFamily::Inet,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )
    .map_err(|error| failed(error.into()))?;
    if interface.len() >= libc::IFNAMSIZ {
        return Err(failed(std::io::Error::from(std::io::ErrorKind::InvalidInput)));
    }
    // SAFETY: all zeroes is a valid ifreq (integers and arrays).
    let mut message: libc::ifreq = unsafe { std::mem::zeroed() };
    for (target, source) in message.ifr_name.iter_mut().zip(interface.bytes()) {
        *target = libc::c_char::from_ne_bytes([source]);
    }
    message.ifr_ifru.ifru_data = buffer.as_mut_ptr().cast();
    // SAFETY: the buffer outlives the call and is as long as the kernel reads and writes for this command.
    let answer = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut message) };
    // Setting features returns bits if the kernel changed more or fewer features than asked; that is no error.
    if answer < 0 {
        Err(failed(std::io::Error::last_os_error()))
    } else {
        Ok(())
    }
}

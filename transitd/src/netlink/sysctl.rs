//! The few sysctls that Thuban needs, under `net/ipv4` and `net/ipv6` of the calling thread's network namespace.

use std::ops::RangeInclusive;
use std::path::Path;

use super::NetlinkError;

/// Turns off reverse-path filtering: replies of the host to pods, and packets of other droplets, come by ways that it
/// does not expect.
pub fn disable_rp_filter(proc_sys_net: &Path, interface: &str) -> Result<(), NetlinkError> {
    write(proc_sys_net, "ipv4", interface, "rp_filter", "0")
}

/// Returns an error if the node has no IPv6. Such a node has no pods with IPv6.
pub fn require_ipv6(proc_sys_net: &Path) -> Result<(), NetlinkError> {
    let path = proc_sys_net.join("ipv6/conf/all/disable_ipv6");
    match std::fs::read_to_string(&path) {
        Ok(text) if text.trim() == "0" => Ok(()),
        Ok(_) => Err(NetlinkError::Ipv6Disabled),
        Err(source) => Err(NetlinkError::Ipv6Missing { path, source }),
    }
}

/// Returns the range in which the kernel chooses source ports of the node's own connections; `None` if it is unknown.
pub fn local_ports(proc_sys_net: &Path) -> Option<RangeInclusive<u16>> {
    let text = std::fs::read_to_string(proc_sys_net.join("ipv4/ip_local_port_range")).ok()?;
    let mut ports = text.split_whitespace().map(str::parse);
    Some(ports.next()?.ok()?..=ports.next()?.ok()?)
}

/// Enables IPv6 on the host's end of a veth, with the addresses that it is given and no others. Runs before the link
/// is up.
pub fn enable_ipv6_on_host(proc_sys_net: &Path, interface: &str) -> Result<(), NetlinkError> {
    // addr_gen_mode 1: no link-local address of its own.
    for (name, value) in [("disable_ipv6", "0"), ("accept_ra", "0"), ("addr_gen_mode", "1")] {
        write(proc_sys_net, "ipv6", interface, name, value)?;
    }
    Ok(())
}

/// Enables IPv6 on the pod's end. Nothing is taken from the network, and an address is usable at once (the operator
/// made it unique). Runs before the link is up.
pub fn enable_ipv6_in_pod(proc_sys_net: &Path, interface: &str) -> Result<(), NetlinkError> {
    for (name, value) in [
        ("disable_ipv6", "0"),
        ("accept_ra", "0"),
        ("autoconf", "0"),
        ("accept_dad", "0"),
    ] {
        write(proc_sys_net, "ipv6", interface, name, value)?;
    }
    Ok(())
}

/// Writes only when the value differs: a read-only /proc/sys with the right value is fine.
fn write(
    proc_sys_net: &Path,
    family: &str,
    interface: &str,
    name: &str,
    value: &'static str,
) -> Result<(), NetlinkError> {
    let path = proc_sys_net.join(family).join("conf").join(interface).join(name);
    if std::fs::read_to_string(&path).is_ok_and(|current| current.trim() == value) {
        return Ok(());
    }
    std::fs::write(&path, value).map_err(|source| NetlinkError::Sysctl { path, value, source })
}

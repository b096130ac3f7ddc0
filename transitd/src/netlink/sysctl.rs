//! The few sysctls that Thuban needs, all under `net/ipv4/conf`.

use std::path::Path;

use super::NetlinkError;

/// Replies of the host to pods and packets of other droplets come by ways that reverse-path filtering does not expect.
pub fn disable_rp_filter(proc_sys_net: &Path, interface: &str) -> Result<(), NetlinkError> {
    write(proc_sys_net, interface, "rp_filter", "0")
}

/// Writes only when the value differs: a read-only /proc/sys with the right value is fine.
fn write(proc_sys_net: &Path, interface: &str, name: &str, value: &'static str) -> Result<(), NetlinkError> {
    let path = proc_sys_net.join("ipv4/conf").join(interface).join(name);
    if std::fs::read_to_string(&path).is_ok_and(|current| current.trim() == value) {
        return Ok(());
    }
    std::fs::write(&path, value).map_err(|source| NetlinkError::Sysctl { path, value, source })
}

//! Chooses the uplink's transit hook, once at start: what the NIC does decides, never the droplet's roles.

use tracing::warn;

use super::links::{Hook, LinkingError, Links};
use crate::netlink::{NetlinkError, ethtool};
use crate::settings::{AgentHook, TransitHookChoice};

/// Where transit runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransitHook {
    /// XDP checks, bounces, divides and decapsulates; the tc program behind it delivers.
    Xdp,
    /// tc does all of it: whole GSO frames pass.
    Tc,
}

impl TransitHook {
    pub fn name(self) -> &'static str {
        match self {
            Self::Xdp => "xdp",
            Self::Tc => "tc",
        }
    }
}

/// What `auto` prefers for a NIC: a veth that passes GSO frames whole wants tc, everything else XDP.
pub fn preferred(choice: TransitHookChoice, driver: &str, passes_gso: bool) -> TransitHook {
    match choice {
        TransitHookChoice::Tc => TransitHook::Tc,
        TransitHookChoice::Auto if driver == "veth" && passes_gso => TransitHook::Tc,
        TransitHookChoice::Auto | TransitHookChoice::Xdp => TransitHook::Xdp,
    }
}

/// Where agents run. At XDP they redirect to the NIC, which must take XDP frames: proven only where transit is at XDP.
pub fn agent(wanted: AgentHook, transit: TransitHook) -> AgentHook {
    if wanted == AgentHook::Xdp && transit == TransitHook::Tc {
        warn!("agents stay at tc: at XDP they need a NIC with transit at XDP");
        return AgentHook::Tc;
    }
    wanted
}

/// Looks at the NIC.
pub fn examine(choice: TransitHookChoice, uplink: &str) -> Result<TransitHook, NetlinkError> {
    let driver = ethtool::driver(uplink)?;
    let passes_gso = ethtool::is_on(uplink, "tx-tcp-segmentation")?
        || ethtool::is_on(uplink, "tx-generic-segmentation")?
        || ethtool::is_on(uplink, "tx-udp_tnl-segmentation")?;
    Ok(preferred(choice, &driver, passes_gso))
}

/// Attaches transit. Where native XDP is refused and was not demanded, tc does all of it.
pub fn attach(
    links: &mut Links,
    choice: TransitHookChoice,
    wanted: TransitHook,
    uplink: &str,
) -> Result<TransitHook, LinkingError> {
    // tc first: what XDP passes on must be met by the program behind it.
    links.ensure(Hook::TransitTc, uplink)?;
    if wanted == TransitHook::Xdp {
        match links.ensure(Hook::TransitXdp, uplink) {
            Ok(()) => return Ok(TransitHook::Xdp),
            Err(error) if choice == TransitHookChoice::Auto => {
                warn!(
                    uplink,
                    error = &error as &dyn std::error::Error,
                    "no native XDP on the uplink, transit runs at tc"
                );
            }
            Err(error) => return Err(error),
        }
    }
    links.release(Hook::TransitXdp, uplink)?;
    Ok(TransitHook::Tc)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_are_at_xdp_only_where_transit_is() {
        assert_eq!(agent(AgentHook::Xdp, TransitHook::Tc), AgentHook::Tc);
        assert_eq!(agent(AgentHook::Xdp, TransitHook::Xdp), AgentHook::Xdp);
        assert_eq!(agent(AgentHook::Tc, TransitHook::Xdp), AgentHook::Tc);
    }

    #[test]
    fn a_veth_that_passes_gso_whole_gets_tc_and_others_xdp() {
        let auto = TransitHookChoice::Auto;
        assert_eq!(preferred(auto, "veth", true), TransitHook::Tc);
        assert_eq!(preferred(auto, "veth", false), TransitHook::Xdp);
        assert_eq!(preferred(auto, "mlx5_core", true), TransitHook::Xdp);
        assert_eq!(preferred(TransitHookChoice::Xdp, "veth", true), TransitHook::Xdp);
        assert_eq!(preferred(TransitHookChoice::Tc, "ena", false), TransitHook::Tc);
    }
}

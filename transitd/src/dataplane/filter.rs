//! The agent at tc: one filter at the ingress of the host's end of a pod's veth.
//!
//! The agent is a filter and no tcx link. Attaching or detaching a tcx program waits for a grace period of RCU, under
//! the lock that all changes of interfaces need. With tcx links ADD and DEL took twice as long, and queued (ADR 10).
//!
//! Invariant: a program takes its predecessor's place in one step. The filter lives and goes with its interface; this
//! module never removes one.

use aya::programs::tc::{
    NlOptions, SchedClassifierLink, TcAttachOptions, TcError, TcHandle, qdisc_add_clsact,
};
use aya::programs::{ProgramError, SchedClassifier, TcAttachType};
use futures::TryStreamExt;
use netlink_packet_route::tc::{TcAttribute, TcFilterBpfOption, TcOption};
use rtnetlink::Handle;

use crate::netlink::{NetlinkError, error_number};

/// The filter's priority: before all filters of others.
const PRIORITY: u16 = 1;
const HANDLE: TcHandle = TcHandle::new(0, 1);

/// Attaches the program to the interface, or replaces the one that is there.
pub fn attach(program: &mut SchedClassifier, interface: &str) -> Result<(), ProgramError> {
    match qdisc_add_clsact(interface) {
        Err(error) if !is_there(&error) => return Err(error.into()),
        _ => {}
    }
    let options = NlOptions {
        priority: PRIORITY,
        handle: HANDLE,
        classid: None,
    };
    let made = program.attach_with_options(
        interface,
        TcAttachType::Ingress,
        TcAttachOptions::Netlink(options),
    );
    let id = match made {
        Err(ProgramError::TcError(error)) if is_there(&error) => {
            program.attach_to_link(attached(interface).map_err(TcError::IoError)?)
        }
        other => other,
    }?;
    // A link that is dropped removes its filter.
    std::mem::forget(program.take_link(id)?);
    Ok(())
}

/// Returns the filter of an interface as a link, which removes it when it is dropped.
pub fn attached(interface: &str) -> std::io::Result<SchedClassifierLink> {
    SchedClassifierLink::attached(interface, TcAttachType::Ingress, PRIORITY, HANDLE, None)
}

/// Returns the id of the program that runs at the agent's place of an interface.
pub async fn program(handle: &Handle, ifindex: u32) -> Result<Option<u32>, NetlinkError> {
    let mut filters = handle
        .traffic_filter(ifindex.cast_signed())
        .get()
        .ingress()
        .execute();
    let mut found = None;
    loop {
        let filter = match filters.try_next().await {
            Ok(Some(filter)) => filter,
            Ok(None) => return Ok(found),
            // The interface has no place for filters, or there is no interface.
            Err(error) if matches!(error_number(&error), Some(libc::EINVAL | libc::ENODEV)) => {
                return Ok(None);
            }
            Err(source) => {
                return Err(NetlinkError::Request {
                    action: "list filters of",
                    object: format!("interface {ifindex}"),
                    source,
                });
            }
        };
        // The priority is in the upper half, the protocol in the lower.
        if filter.header.info >> 16 == u32::from(PRIORITY)
            && u32::from(filter.header.handle) == u32::from(HANDLE)
        {
            found = found.or(program_id(&filter.attributes));
        }
    }
}

fn program_id(attributes: &[TcAttribute]) -> Option<u32> {
    let options = attributes.iter().find_map(|attribute| match attribute {
        TcAttribute::Options(options) => Some(options),
        _ => None,
    })?;
    options.iter().find_map(|option| match option {
        TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => Some(*id),
        _ => None,
    })
}

fn is_there(error: &TcError) -> bool {
    matches!(error, TcError::NetlinkError(error) if error.raw_os_error() == Some(libc::EEXIST))
}

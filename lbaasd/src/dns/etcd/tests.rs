use data_encoding::BASE64;

use super::{LEAVES, end_of_leaves, leaf, nobodys, node, values};
use crate::dns::Record;

#[test]
fn a_names_key_is_its_labels_from_the_last_to_the_first() {
    let shop = node("/skydns", "shop.red.apps.example.com");
    assert_eq!(shop, "/skydns/com/example/apps/red/shop");
    assert_eq!(leaf(&shop, 1), "/skydns/com/example/apps/red/shop/_thuban6");
}

#[test]
fn the_range_of_leaves_has_all_leaves_and_no_name() {
    let shop = node("/skydns", "shop.apps");
    let range = leaf(&shop, 0)..end_of_leaves(&shop);
    for leaf in LEAVES {
        assert!(range.contains(&format!("{shop}/{leaf}")), "{leaf}");
    }
    for label in ["0", "9", "a", "thuban4", "zz", "xn--p1ai"] {
        assert!(!range.contains(&format!("{shop}/{label}")), "{label}");
    }
}

#[test]
fn a_claim_of_the_longest_name_fits_into_a_transaction() {
    let name = vec!["a"; crate::dns::zones::MAX_LABELS].join(".");
    // etcd's --max-txn-ops; the write adds a comparison for each leaf.
    assert!(nobodys("/skydns", "a", &name).len() + LEAVES.len() <= 128);
}

#[test]
fn a_value_says_address_ttl_and_owner() {
    let record = Record {
        name: "shop.apps".into(),
        addresses: vec!["2001:db8::7".parse().unwrap()],
        ttl_seconds: 30,
    };
    let [v4, v6] = values("uid-1", &record).unwrap();
    assert_eq!(v4, None);
    let text = String::from_utf8(BASE64.decode(v6.unwrap().as_bytes()).unwrap()).unwrap();
    assert_eq!(
        text,
        r#"{"host":"2001:db8::7","ttl":30,"owner":"thuban/vip/uid-1"}"#
    );
}

# The bytes of the file IN as a C array NAME in the file OUT.
file(READ ${IN} hex HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
file(WRITE ${OUT} "#include <stddef.h>\n\nextern const unsigned char ${NAME}[];\n"
    "extern const size_t ${NAME}_size;\n\nconst unsigned char ${NAME}[] = { ${bytes} 0 };\n"
    "const size_t ${NAME}_size = sizeof ${NAME} - 1;\n")
